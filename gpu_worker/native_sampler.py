"""Sampling on the CPU by compiled code (native/sampler.cpp): draws what `sampler` draws.

Both compute the same in single precision; where two tokens are as good as one another to within a
rounding error, they may differ.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from gpu_worker.block_table import IntArray
from gpu_worker.native import library
from gpu_worker.sampling_columns import SamplingColumns

_int64, _address = ctypes.c_int64, ctypes.c_void_p

_COLUMNS = ("temperature", "top_p", "min_p", "top_k", "seed")


class _Columns(ctypes.Structure):
    """`Columns` of sampler.cpp."""

    _fields_ = tuple((name, _address) for name in _COLUMNS)


class NativeSampler:
    """Samples rows of logits on the host. Raises NoLibraryError where it cannot be compiled."""

    def __init__(self, cache_dir: Path) -> None:
        self._sample = library.load("sampler", cache_dir).sample
        self._sample.argtypes = (_address, _int64, _int64, *[_address] * 4)
        self._columns: SamplingColumns | None = None  # whose addresses these are
        self._addresses = _Columns()

    def __call__(
        self, logits: Tensor, columns: SamplingColumns, rows: IntArray, output_index: IntArray
    ) -> Tensor:
        """Sample output token `output_index` (N,) of rows (N,) from logits (N, V)."""
        if columns is not self._columns:
            self._columns = columns
            self._addresses = _Columns(*(getattr(columns, name).ctypes.data for name in _COLUMNS))
        logits = logits.float().contiguous()
        token_ids = torch.empty(len(rows), dtype=torch.int64)
        tensors = (logits, torch.from_numpy(rows), torch.from_numpy(output_index), token_ids)
        self._sample(
            ctypes.addressof(self._addresses), *logits.shape, *(t.data_ptr() for t in tensors)
        )
        return token_ids
