"""Decode steps that a CUDA graph repeats: one graph for each of a few sizes of a batch.

A graph is a list of launches with fixed addresses, so all that differs between steps is in tensors
that never move, and is written there before each replay:

    rows        0 … n - 1  the decode batch   |   n … B - 1  padding: length 0, slot -1
    size B      the smallest that holds n

Padding stores no key, attends to nothing, and its logits are not looked at. A step that is not only
decodes, or whose attention falls into more pieces than a graph has room for, is no affair of this
module: it runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.attention.base import StaticBackend, StaticDecodes
from gpu_worker.model_loader import LoadedModel
from gpu_worker.request_states import Capacity, RequestStates
from gpu_worker.transfer import to_device
from gpu_worker.work import Work
from kernels.decode_plan import MAX_ITEMS, SPLIT, work_starts

_NUM_LONG = 3  # columns of int64: rows, positions, slots


class Capture(Protocol):
    """What makes work repeatable."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do the work at least once; gives what does the same to the same memory again."""


class CudaCapture:
    """Captures in CUDA graphs, which share one pool of memory.

    The largest work should come first: what follows then fits into its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run twice beside the graph, so that everything is compiled and allocated; then capture.

        Raises RuntimeError for work that a graph cannot hold, as what reads a number back.
        """
        side: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
        ):
            work()
        if self._pool is None:
            self._pool = graph.pool()
        replay: Callable[[], None] = graph.replay
        return replay


def sizes_up_to(largest: int) -> list[int]:
    """Sizes of batches that get a graph: at most a third of a batch above 16 rows is padding."""
    sizes = [1, 2, 4, 8]
    power = 16
    while power < largest:
        sizes += [power, power + power // 2]
        power *= 2
    return [size for size in sizes if size < largest] + [largest]


class _Columns:
    """The numbers of B rows in one stretch, so that they come to the device in one copy.

    int64  rows, positions, slots, B each | int32  lengths, B; then B + 1 starts by window
    """

    def __init__(self, size: int, num_windows: int) -> None:
        self.size = size
        self._num_long = _NUM_LONG * size
        self.num_words = 2 * self._num_long + size + num_windows * (size + 1)

    def long(self, flat: Any) -> Any:
        """(3, B) int64 of the words (…,), on the host or on the device."""
        kind = np.int64 if isinstance(flat, np.ndarray) else torch.int64
        return flat[: 2 * self._num_long].view(kind).reshape(_NUM_LONG, self.size)

    def lens(self, flat: Any) -> Any:
        """(B,) int32."""
        return flat[2 * self._num_long :][: self.size]

    def starts(self, flat: Any) -> Any:
        """(W, B + 1) int32."""
        return flat[2 * self._num_long + self.size :].reshape(-1, self.size + 1)


class DecodeGraphs:
    """The graphs of one cache, and the tensors that they read and write."""

    def __init__(
        self, model: LoadedModel, backend: StaticBackend, capacity: Capacity, capture: Capture
    ) -> None:
        """Capture all sizes. Raises RuntimeError for a model that cannot be captured."""
        self._model = model
        self._backend = backend
        self._capacity = capacity
        self._windows = sorted({how.sliding_window or 0 for how in model.attention})
        self._sizes = sizes_up_to(capacity.max_num_seqs)
        most = self._sizes[-1]
        per_row = -(-capacity.max_model_len // SPLIT) + 1  # a step may be in flight at the end
        self._max_items = {size: max(min(size * per_row, MAX_ITEMS), size) for size in self._sizes}
        self._columns = {size: _Columns(size, len(self._windows)) for size in self._sizes}
        self._flat = {size: self._int32(self._columns[size].num_words) for size in self._sizes}
        self._tables = self._int32(most, capacity.max_blocks_per_request)
        self._every = torch.arange(most, device=model.device)
        self._token_ids = torch.zeros_like(self._every)
        self._logits = torch.empty(0, device=model.device)
        self._replays: dict[int, Callable[[], None]] = {}
        for size in reversed(self._sizes):  # the largest first: all share its memory
            self._write(size, *self._padded(size))
            self._replays[size] = capture(lambda size=size: self._decode(size))  # type: ignore[misc]

    def holds(self, work: Work) -> bool:
        """Whether a graph can do this work."""
        num_rows = len(work.rows)
        if not work.is_decode or not num_rows:
            return False
        num_pieces = int((-(-work.seq_lens // SPLIT)).sum())  # or fewer, with a window
        return num_pieces <= self._max_items[self._size_for(num_rows)]

    def run(self, states: RequestStates, work: Work) -> Tensor:
        """Logits (n, V) of n decodes, which hold until the next run. The work must be held."""
        num_rows = len(work.rows)
        size = self._size_for(num_rows)
        lens, long = self._padded(size)
        lens[:num_rows] = work.seq_lens
        long[0, :num_rows] = work.rows
        long[1, :num_rows] = work.num_computed
        long[2, :num_rows] = states.block_table.slots(work.rows, work.num_computed)
        self._write(size, lens, long)
        num_columns = int(-(-work.seq_lens.max() // states.block_table.block_size))
        blocks = states.block_table.of(work.rows, num_columns).astype(np.int32)
        self._tables[:num_rows, :num_columns] = to_device(blocks, self._model.device)
        rows = self._columns[size].long(self._flat[size])[0, :num_rows]
        self._token_ids[:num_rows] = states.last_tokens.all[rows]
        self._replays[size]()
        return self._logits[:num_rows]

    def _size_for(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    def _padded(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lengths (B,), and rows, positions and slots (3, B), of nothing but padding."""
        long = np.zeros((_NUM_LONG, size), dtype=np.int64)
        long[2] = -1
        return np.zeros(size, dtype=np.int64), long

    def _write(self, size: int, lens: NDArray[np.int64], long: NDArray[np.int64]) -> None:
        """Bring the columns of B rows to where their graph reads them."""
        columns = self._columns[size]
        flat = np.empty(columns.num_words, dtype=np.int32)
        columns.long(flat)[:] = long
        columns.lens(flat)[:] = lens
        for starts, window in zip(columns.starts(flat), self._windows, strict=True):
            starts[:] = work_starts(lens, window)
        self._flat[size].copy_(to_device(flat, self._model.device))

    def _decode(self, size: int) -> None:
        """What a graph of B rows holds: from token ids to logits."""
        columns, flat = self._columns[size], self._flat[size]
        _, positions, slots = columns.long(flat)
        self._backend.begin_static_step(
            StaticDecodes(
                slot_mapping=slots,
                seq_lens=columns.lens(flat),
                block_tables=self._tables[:size],
                work_starts=dict(zip(self._windows, columns.starts(flat), strict=True)),
                max_items=self._max_items[size],
            )
        )
        every = self._every[:size]
        logits = self._model.forward(self._token_ids[:size], positions, every, self._backend)
        if not len(self._logits):
            self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
        self._logits[:size] = logits

    def _int32(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._model.device)
