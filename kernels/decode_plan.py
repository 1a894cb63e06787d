"""Which pieces of which sequences a decode step attends to.

A sequence is cut at multiples of SPLIT tokens, whatever else is in the batch, so its result is the
same in any batch, bit by bit.

    lengths 700, 300, 1100 and SPLIT 512     work items  | 0 1 | 2 | 3 4 5 |
                                             work_starts   0     2   3       6
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SPLIT = 512  # tokens; a multiple of every tile and block. Frozen: it decides how sums are rounded
MAX_ITEMS = 4096  # whose partial results are kept at once


@dataclass(frozen=True, slots=True)
class Launch:
    """Sequences that are attended to together."""

    first_seq: int
    num_seqs: int
    max_items: int  # room for as many pieces; how many there are, the device reads
    needs_reduce: bool  # some sequence may be not in exactly one piece


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The work items of one step, for all layers with the same sliding window."""

    seq_lens: Tensor  # (S,) int32
    work_starts: Tensor  # (S + 1,) int32: sequence s has the items [work_starts[s], …[s + 1])
    launches: list[Launch]
    window: int  # 0 is none
    split: int


def work_starts(
    seq_lens: NDArray[np.integer[Any]], window: int = 0, *, split: int = SPLIT
) -> NDArray[np.int32]:
    """Where the work items of each sequence begin, and where the last ones end: (S + 1,)."""
    lens = np.asarray(seq_lens, dtype=np.int64)
    num_pieces = -(-lens // split)
    if window:
        num_pieces -= np.maximum(lens - window, 0) // split  # nobody sees those
    starts: NDArray[np.int32] = np.concatenate(([0], np.cumsum(num_pieces))).astype(np.int32)
    return starts


def repeatable_plan(seq_lens: Tensor, starts: Tensor, window: int, *, max_items: int) -> DecodePlan:
    """Plan one launch for whatever lengths (S,) int32 are there when it happens.

    `starts` (S + 1,) int32 are their `work_starts`. Both are tensors of the device, and may be
    written anew between launches, but never to more than `max_items` pieces.
    """
    launch = Launch(0, len(seq_lens), max_items, needs_reduce=True)
    return DecodePlan(seq_lens, starts, [launch], window, SPLIT)


def plan_decodes(
    seq_lens: NDArray[np.integer[Any]],
    device: torch.device,
    window: int = 0,
    *,
    split: int = SPLIT,
    max_items: int = MAX_ITEMS,
) -> DecodePlan:
    """Plan for sequences of the lengths (S,), on the host: nothing waits for the device.

    Those that share a long prefix may have many more items than the cache has tokens, so what is
    in flight at once is bounded by `max_items` (of one sequence alone, by its length).
    """
    lens = np.asarray(seq_lens, dtype=np.int64)
    starts = work_starts(lens, window, split=split)
    num_pieces = np.diff(starts)
    launches = []
    first = 0
    while first < len(lens):
        last = int(np.searchsorted(starts, starts[first] + max_items, side="right")) - 1
        last = min(max(last, first + 1), len(lens))
        needs_reduce = bool((num_pieces[first:last] != 1).any())
        launches.append(
            Launch(first, last - first, int(starts[last] - starts[first]), needs_reduce)
        )
        first = last
    both = torch.from_numpy(np.concatenate((starts, lens.astype(np.int32)))).to(device)
    return DecodePlan(both[len(starts) :], both[: len(starts)], launches, window, split)
