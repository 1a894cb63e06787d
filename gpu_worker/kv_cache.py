"""How much memory the cache gets, in blocks.

Measures once, at start. The cache itself is made by the attention backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import structlog
import torch

from gpu_worker.attention.base import KVShape
from gpu_worker.input_batch import Capacity
from wire.config import Settings
from wire.service import StartupError

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


def cuda_budget(
    settings: Settings, device: torch.device, run_largest_step: Callable[[], None]
) -> int:
    """Bytes for blocks on a GPU: its share, less what is used and what the largest step needs."""
    if settings.kv_cache_memory_bytes:
        return settings.kv_cache_memory_bytes
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    peak = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return int(total * settings.gpu_memory_utilization) - (total - free) - peak


def fit(settings: Settings, wanted: Capacity, block_bytes: int, budget: int, free: int) -> Capacity:
    """Decide the number of blocks, and shorten the longest request to what they hold.

    `wanted` is the capacity that the model and the settings ask for, without blocks; `free` is
    what the device has left now. Sizes are in bytes. Raises StartupError if nothing useful fits.
    """
    num_blocks = settings.num_gpu_blocks or budget // block_bytes
    needed = max(num_blocks, 1) * block_bytes
    if num_blocks < 1 or needed > free:
        raise StartupError(
            f"not enough memory for the KV cache: {max(num_blocks, 1)} blocks of {block_bytes} "
            f"bytes need {_gib(needed)}; {_gib(free)} is free and {_gib(budget)} may be used"
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


def check_cpu_pool(num_cpu_blocks: int, block_bytes: int, free: int) -> None:
    """Raise StartupError if the CPU pool is larger than the main memory that is left for it."""
    needed = num_cpu_blocks * block_bytes
    if needed > free:
        raise StartupError(
            f"NUM_CPU_BLOCKS={num_cpu_blocks}: blocks of {block_bytes} bytes need {_gib(needed)}; "
            f"{_gib(free)} is free"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
