"""How much memory the cache gets, in blocks.

Measures once, at start. The cache itself is made by the attention backend.

    a GPU's memory   | GPU_MEMORY_UTILIZATION of it                             | others' |
                     | in use: weights, kernels, others | largest step | graphs |  cache |
                       measured after the rehearsal       measured in a rehearsal  the rest
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil
import structlog
import torch

from gpu_worker.attention.base import KVShape
from gpu_worker.request_states import Capacity
from wire.config import Settings, SettingsError

log = structlog.get_logger()

_GIB = 1024**3
_CPU_DEFAULT_MAX = 4 * _GIB
_CGROUP = Path("/sys/fs/cgroup")


def bytes_per_block(shapes: list[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    return sum(shape.num_elements for shape in shapes) * block_size * dtype.itemsize


def free_memory() -> int:
    """Bytes of main memory that this process may still take: the machine's, or its container's."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else min(free, max(int(limit) - used, 0))


def cpu_budget(settings: Settings, free_at_start: int) -> int:
    """Bytes for blocks in main memory."""
    default = min(free_at_start // 4, _CPU_DEFAULT_MAX)
    return settings.kv_cache_memory_bytes or default


class Meter(Protocol):
    """The memory of a device, in bytes."""

    def total(self) -> int:
        """All there is."""

    def free(self) -> int:
        """What nobody uses, after giving back what this process keeps without need."""

    def peak_of(self, run: Callable[[], object]) -> int:
        """Run; the most that was in use meanwhile beyond what is in use before."""


class CudaMeter:
    """The memory of a GPU, as driver and allocator count it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        """All there is."""
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        """What no process uses, once the allocator has given back what it keeps."""
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_of(self, run: Callable[[], object]) -> int:
        """The most that the allocator holds while this runs, gaps between tensors included."""
        self.free()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device) - before


@dataclass(frozen=True, slots=True)
class Room:
    """What a device has for blocks, in bytes."""

    budget: int  # may be used
    free: int  # could be used


def measure(
    settings: Settings,
    meter: Meter,
    run_largest_steps: Callable[[], None],
    make_repeatable: Callable[[], None],
    forget: Callable[[], None],
) -> Room:
    """Rehearse on a GPU with next to no cache, and see what that leaves for one.

    What the steps and the graphs took is kept free for them, so that no step fails for memory
    later. `forget` gives back all that the rehearsal made. Raises SettingsError if not even the
    rehearsal fits.
    """
    try:
        step = meter.peak_of(run_largest_steps)
        before = meter.free()
        make_repeatable()
        graphs = max(before - meter.free(), 0)
    except torch.OutOfMemoryError as error:
        raise SettingsError(
            f"MAX_NUM_BATCHED_TOKENS={settings.max_num_batched_tokens} and "
            f"MAX_NUM_SEQS={settings.max_num_seqs}: a step of so many does not fit into the memory "
            f"that the model leaves ({_gib(meter.free())} of {_gib(meter.total())} is free): "
            f"{str(error).splitlines()[0]}"
        ) from None
    forget()
    free, total = meter.free(), meter.total()
    log.info("memory_measured", step=_gib(step), graphs=_gib(graphs), used=_gib(total - free))
    left = int(total * settings.gpu_memory_utilization) - (total - free) - step - graphs
    return Room(settings.kv_cache_memory_bytes or left, free - step - graphs)


def fit(settings: Settings, wanted: Capacity, block_bytes: int, room: Room) -> Capacity:
    """Decide the number of blocks, and shorten the longest request to what they hold.

    `wanted` is the capacity that the model and the settings ask for, without blocks. Raises
    SettingsError if nothing useful fits, with the setting that decided the size.
    """
    num_blocks = settings.num_gpu_blocks or room.budget // block_bytes
    needed = max(num_blocks, 1) * block_bytes
    if num_blocks < 1 or needed > room.free:
        raise SettingsError(
            f"{_deciding(settings)}: not enough memory for the KV cache: "
            f"{max(num_blocks, 1)} blocks of {block_bytes} bytes need {_gib(needed)}; "
            f"{_gib(max(room.free, 0))} is free and {_gib(max(room.budget, 0))} may be used"
        )
    capacity = replace(wanted, num_blocks=num_blocks)
    longest = num_blocks * capacity.block_size
    if longest < capacity.max_model_len:
        log.warning(
            "max_model_len_lowered",
            wanted=capacity.max_model_len,
            fits=longest,
            num_blocks=num_blocks,
        )
        capacity = replace(capacity, max_model_len=longest)
    return capacity


def _deciding(settings: Settings) -> str:
    if settings.num_gpu_blocks:
        return f"NUM_GPU_BLOCKS={settings.num_gpu_blocks}"
    if settings.kv_cache_memory_bytes:
        return f"KV_CACHE_MEMORY_BYTES={settings.kv_cache_memory_bytes}"
    return (
        f"GPU_MEMORY_UTILIZATION={settings.gpu_memory_utilization}, KV_CACHE_MEMORY_BYTES not set"
    )


def check_cpu_pool(num_cpu_blocks: int, block_bytes: int, free: int) -> None:
    """Raise SettingsError if the CPU pool is larger than the main memory that is left for it."""
    needed = num_cpu_blocks * block_bytes
    if needed > free:
        raise SettingsError(
            f"NUM_CPU_BLOCKS={num_cpu_blocks}: blocks of {block_bytes} bytes need {_gib(needed)}; "
            f"{_gib(free)} is free"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
