"""Weights in the order in which the inner loops of matmul.h read them.

Owns the layout, and the quantization to int8: a scale for each output, so that its largest weight
becomes 127.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_worker.native.memory import Pages

COLS = 32  # outputs of a panel
INPUTS = 64  # inputs are padded to a multiple of this, which is whole tiles for every type
HALF = COLS // 2
SHARE = 64  # inputs whose activations have a scale of their own, of int8

_PACK = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}  # inputs that lie side by side


class LinearStruct(ctypes.Structure):
    """`Linear` of matmul.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "scales", "sums", "bias")),
        *((name, ctypes.c_int64) for name in ("num_outputs", "num_inputs")),
    )


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A matrix in panels: (outputs / COLS, inputs / pack, COLS, pack)."""

    weights: Tensor
    scales: Tensor | None  # (outputs,) float32, of int8
    sums: Tensor | None  # (inputs / SHARE, outputs) int32: of each output's weights, of int8
    bias: Tensor | None  # (outputs,) float32

    def struct(self) -> LinearStruct:
        """Addresses for C++, valid while this lives."""
        panels, groups, cols, pack = self.weights.shape
        optional = (self.scales, self.sums, self.bias)
        addresses = (None if t is None else t.data_ptr() for t in optional)
        return LinearStruct(self.weights.data_ptr(), *addresses, panels * cols, groups * pack)


def pack(weight: Tensor, bias: Tensor | None, kind: torch.dtype, pages: Pages) -> PackedLinear:
    """Pack a weight (N, K), and perhaps a bias (N,), for products in float32, bfloat16 or int8."""
    outputs, inputs = weight.shape
    padding = -outputs % COLS
    weight = pad(weight, (0, -inputs % INPUTS, 0, padding))
    scales = sums = None
    if kind == torch.int8:
        scales = weight.float().abs().amax(1) / 127
        weight = (weight.float() / scales.clamp(min=1e-30).unsqueeze(1)).round()
        sums = weight.view(len(weight), -1, SHARE).sum(2).T.int().contiguous()
    if bias is not None:
        bias = pad(bias.float(), (0, padding))
    panels = weight.to(kind).view(-1, COLS, weight.shape[1] // _PACK[kind], _PACK[kind])
    panels = panels.transpose(1, 2)
    return PackedLinear(pages.take(panels.shape, kind).copy_(panels), scales, sums, bias)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of both (N, K), HALF of each by turns: a panel has the two that are multiplied."""
    size = gate.shape[1]
    return torch.stack((gate.view(-1, HALF, size), up.view(-1, HALF, size)), dim=1).view(-1, size)
