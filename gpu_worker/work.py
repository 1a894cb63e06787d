"""What one step runs, as rows and lengths; a step that is too large for the memory, in two.

Owns no state, and decides nothing of what is in a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gpu_worker.block_table import IntArray
from wire.messages import RequestError


@dataclass(frozen=True, slots=True)
class Work:
    """What one step runs, in order: the decode batch, those that catch up, the new ones.

    Row i runs its tokens [seq_lens[i] - query_lens[i], seq_lens[i]).
    """

    rows: IntArray  # (S,)
    query_lens: IntArray  # (S,) at least 1
    seq_lens: IntArray  # (S,)
    samples: NDArray[np.bool_]  # (S,) reaches the end of its known tokens
    num_decodes: int  # rows [0, this) are the decode batch; all of it samples
    errors: list[RequestError]  # of requests that run all the same, so that the rest is unharmed


def halves(work: Work) -> tuple[Work, Work] | None:
    """The same work as two smaller steps, to be run in this order; None if it is a single token.

    The order matters: a request may read keys and values that one before it writes.
    """
    num_rows = len(work.rows)
    if num_rows > 1:
        cut = num_rows // 2
        return _rows_of(work, 0, cut), _rows_of(work, cut, num_rows)
    if work.query_lens[0] == 1:
        return None
    first = work.query_lens // 2
    rest = work.query_lens - first
    before = replace(
        work, query_lens=first, seq_lens=work.seq_lens - rest, samples=np.zeros(1, dtype=np.bool_)
    )
    return before, replace(work, query_lens=rest)


def _rows_of(work: Work, start: int, end: int) -> Work:
    return Work(
        rows=work.rows[start:end],
        query_lens=work.query_lens[start:end],
        seq_lens=work.seq_lens[start:end],
        samples=work.samples[start:end],
        num_decodes=min(max(work.num_decodes - start, 0), end - start),
        errors=[],
    )
