"""The CPU pool: copies of blocks of preempted requests, and the copying.

Owns the pool's memory. Which block is copied where is the scheduler's business.

The step stream is the order: what is copied out is read before any later step writes it, and what
is copied in is there before its step computes. On a GPU the copies go through a stream of their
own, which waits for the computation before and is waited for by the computation after.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.block_table import ProtocolError
from wire.messages import BlockCopies


class SwapPool:
    """Room for `num_cpu_blocks` blocks of every layer, in main memory, beside a backend's cache.

    To be made after the cache. Memory that was never written may hold anything.
    """

    def __init__(self, backend: AttentionBackend, num_layers: int, num_cpu_blocks: int) -> None:
        self._num_cpu_blocks = num_cpu_blocks
        self._pairs: list[tuple[Tensor, Tensor]] = []  # device and CPU pool, of K and V by layer
        for layer in range(num_layers):
            for pool in backend.cache(layer):
                self._pairs.append((pool, _like(pool, num_cpu_blocks)))
        device = self._pairs[0][0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, copies: Sequence[BlockCopies]) -> int:
        """Do the copies of a step, one after the other; microseconds that the step waits for them.

        Raises ProtocolError for blocks that are in no pool.
        """
        if not copies:
            return 0
        for one in copies:
            self._check(one)
        started = time.perf_counter()
        if self._stream is None:
            for one in copies:
                self._copy(one)
        else:
            self._copy_on(self._stream, copies)
        return round((time.perf_counter() - started) * 1e6)

    def _copy_on(self, stream: torch.cuda.Stream, copies: Sequence[BlockCopies]) -> None:
        computing = torch.cuda.current_stream(stream.device)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            for one in copies:
                self._copy(one)
        computing.wait_stream(stream)
        stream.synchronize()  # so that the time is that of the copies

    def _check(self, copies: BlockCopies) -> None:
        if len(copies.device_blocks) != len(copies.cpu_blocks):
            raise ProtocolError("the columns of copies differ in length")
        num_device_blocks = len(self._pairs[0][0])
        for blocks, count, name in (
            (copies.device_blocks, num_device_blocks, "device"),
            (copies.cpu_blocks, self._num_cpu_blocks, "CPU"),
        ):
            if any(not 0 <= block < count for block in blocks):
                raise ProtocolError(f"{name} blocks {blocks[:8]} are copied: there are {count}")

    def _copy(self, copies: BlockCopies) -> None:
        device_ids, cpu_ids = torch.tensor(copies.device_blocks), torch.tensor(copies.cpu_blocks)
        for device_pool, cpu_pool in self._pairs:
            if copies.direction == "out":
                _copy_blocks(device_pool, device_ids, cpu_pool, cpu_ids)
            else:
                _copy_blocks(cpu_pool, cpu_ids, device_pool, device_ids)


def _copy_blocks(source: Tensor, from_ids: Tensor, target: Tensor, to_ids: Tensor) -> None:
    """Copy block from_ids[i] of source (NB, …) to block to_ids[i] of target (NB', …)."""
    if source.device == target.device:
        target[to_ids] = source[from_ids]
        return
    for from_id, to_id in zip(from_ids.tolist(), to_ids.tolist(), strict=True):
        target[to_id].copy_(source[from_id], non_blocking=True)


def _like(pool: Tensor, num_blocks: int) -> Tensor:
    """Blocks of the same form in main memory; pinned, if the pool is on a GPU."""
    is_cuda = pool.device.type == "cuda"
    return torch.empty((num_blocks, *pool.shape[1:]), dtype=pool.dtype, pin_memory=is_cuda)
