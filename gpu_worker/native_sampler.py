"""Sampling on the CPU by compiled code (native/sampler.cpp): draws what `sampler` draws.

Both compute the same in single precision; where two tokens are as good as one another to within a
rounding error, they may differ.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpu_worker.block_table import IntArray
from gpu_worker.native import library
from gpu_worker.sampler import SamplerOutput
from gpu_worker.sampling_columns import SamplingColumns

_COLUMNS = ("logits", "temperature", "top_p", "min_p", "top_k", "seed", "output_index")


class _Rows(ctypes.Structure):
    """`Rows` of sampler.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _COLUMNS),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens")),
        ("token_ids", ctypes.c_void_p),
    )


class NativeSampler:
    """Samples rows of logits on the host. Raises NoLibraryError where it cannot be compiled."""

    def __init__(self, cache_dir: Path) -> None:
        self._library = library.load("sampler", cache_dir)

    def __call__(
        self, logits: Tensor, columns: SamplingColumns, rows: IntArray, output_index: IntArray
    ) -> SamplerOutput:
        """Sample output token `output_index` (N,) of rows (N,) from logits (N, V)."""
        logits = logits.float().contiguous()
        num_rows, num_tokens = logits.shape
        token_ids: IntArray = np.empty(num_rows, dtype=np.int64)
        sources = (
            *(columns.temperature[rows], columns.top_p[rows], columns.min_p[rows]),
            *(columns.top_k[rows], columns.seed[rows], output_index),
        )
        addresses = (source.ctypes.data for source in sources)
        work = _Rows(
            *(logits.data_ptr(), *addresses), *(num_rows, num_tokens), token_ids.ctypes.data
        )
        self._library.sample(ctypes.byref(work))
        drawn = torch.from_numpy(token_ids)
        return SamplerOutput(drawn.clamp(min=0), drawn >= 0)
