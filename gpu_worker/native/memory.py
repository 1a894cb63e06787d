"""Main memory in huge pages, for what is read from one end to the other in every step.

Huge pages spare the processor a look-up every 4 KiB, and its own fetching ahead does not stop
there. They are asked for, not demanded: where the kernel has none, the memory is ordinary.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK_BYTES = 64 * 1024**2
_ALIGNMENT = 64

# Names of glibc's mallopt, and how much of what a step has freed the next one finds in place.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 256 * 1024**2


def keep_what_is_freed() -> None:
    """Have the allocator keep what steps use and free each time, rather than give it back.

    Logits of a few rows are megabytes: as fresh memory the kernel has to clear them page by page,
    each time anew. Changes nothing where the C library is not glibc.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES // 4)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros, as a tensor on pages of its own."""
    return Pages(math.prod(shape) * dtype.itemsize).take(shape, dtype)


class Pages:
    """Gives out memory in chunks that many small tensors share."""

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = mmap.mmap(-1, mmap.PAGESIZE)
        self._used = mmap.PAGESIZE

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on memory of its own; it keeps the chunk alive."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if not size:
            return torch.empty(tuple(shape), dtype=dtype)
        if self._used + size > len(self._chunk):
            self._chunk, self._used = _mapped(max(size, self._chunk_bytes)), 0
        offset, self._used = self._used, -(-(self._used + size) // _ALIGNMENT) * _ALIGNMENT
        flat = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=offset)
        return flat.view(tuple(shape))


def _mapped(size: int) -> mmap.mmap:
    chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk
