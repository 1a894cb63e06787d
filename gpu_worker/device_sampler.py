"""Sampling by the kernel of the GPU: draws what `sampler` draws, and never waits for the device.

Greedy rows go with the others, at temperature 0, so that the launch is the same for any mixture.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gpu_worker.block_table import IntArray
from gpu_worker.sampler import NO_TOKEN, row_keys
from gpu_worker.sampling_columns import SamplingColumns
from gpu_worker.transfer import to_device
from kernels.draw import Draw
from kernels.sampling import sample as launch

_ALIGNMENT = 4  # numbers: a column starts at a multiple of 16 bytes, for any number of rows


def sample(
    logits: Tensor, columns: SamplingColumns, rows: IntArray, output_index: IntArray
) -> Tensor:
    """Sample output token `output_index` (N,) of rows (N,) from logits (N, V)."""
    token_ids, is_finite = launch(logits, _draw(logits, columns, rows, output_index))
    return torch.where(is_finite, token_ids, NO_TOKEN)


def _draw(logits: Tensor, columns: SamplingColumns, rows: IntArray, output_index: IntArray) -> Draw:
    """The columns of a draw, which come to the device in one copy."""
    num_rows, vocab_size = logits.shape
    width = -(-num_rows // _ALIGNMENT) * _ALIGNMENT
    packed = np.zeros((6, width), dtype=np.int32)
    floats = packed.view(np.float32)
    floats[0, :num_rows] = columns.temperature[rows]
    floats[1, :num_rows] = columns.top_p[rows]
    floats[2, :num_rows] = columns.min_p[rows]
    packed[3, :num_rows] = np.minimum(columns.top_k[rows], vocab_size)
    packed[4:].reshape(-1)[: 2 * num_rows] = row_keys(columns.seed[rows], output_index).reshape(-1)
    here = to_device(packed, logits.device)
    as_floats = here.view(torch.float32)
    return Draw(
        temperature=as_floats[0, :num_rows],
        top_k=here[3, :num_rows],
        top_p=as_floats[1, :num_rows],
        min_p=as_floats[2, :num_rows],
        keys=here[4:].view(-1)[: 2 * num_rows].view(num_rows, 2),
    )
