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

    Row i runs its tokens [num_computed[i], seq_lens[i]).
    """

    rows: IntArray  # (S,)
    num_computed: IntArray  # (S,)
    seq_lens: IntArray  # (S,)
    num_decodes: int  # rows [0, this) are the decode batch: they run a token, and sample
    samples: NDArray[np.bool_]  # (S - num_decodes,) reaches the end of its known tokens
    errors: list[RequestError]  # of requests that run all the same, so that the rest is unharmed

    @property
    def is_decode(self) -> bool:
        """Whether all rows are the decode batch: most steps are so, and take a shorter way."""
        return self.num_decodes == len(self.rows)

    @property
    def num_sampling(self) -> int:
        """N, of the rows that sample."""
        return self.num_decodes + int(np.count_nonzero(self.samples))

    def of_sampling(self, column: IntArray) -> IntArray:
        """Of a column (S,), the numbers (N,) of the rows that sample; itself, if all do."""
        if self.is_decode:
            return column
        return np.concatenate(
            (column[: self.num_decodes], column[self.num_decodes :][self.samples])
        )


def halves(work: Work) -> tuple[Work, Work] | None:
    """The same work as two smaller steps, to be run in this order; None if it is a single token.

    The order matters: a request may read keys and values that one before it writes.
    """
    num_rows = len(work.rows)
    if num_rows > 1:
        cut = num_rows // 2
        return _rows_of(work, 0, cut), _rows_of(work, cut, num_rows)
    middle = (work.num_computed + work.seq_lens) // 2
    if middle == work.num_computed:
        return None
    before = replace(work, seq_lens=middle, samples=np.zeros(1, dtype=np.bool_))
    return before, replace(work, num_computed=middle)


def _rows_of(work: Work, start: int, end: int) -> Work:
    first = work.num_decodes  # that `samples` speaks of
    return Work(
        rows=work.rows[start:end],
        num_computed=work.num_computed[start:end],
        seq_lens=work.seq_lens[start:end],
        num_decodes=min(max(first - start, 0), end - start),
        samples=work.samples[max(start - first, 0) : max(end - first, 0)],
        errors=[],
    )
