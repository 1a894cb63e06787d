"""Norms and gated MLPs of a stock model by the kernels of the GPU: fewer launches, same numbers.

Owns which modules are replaced, and the check of each: it must say what the untouched one says of
random numbers, within what the dtype allows. Whatever is not known, or does not pass, stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor, nn
from torch.nn import functional

from gpu_worker.model_loader import LoadedModel
from kernels.residual_rmsnorm import residual_rmsnorm
from kernels.silu_mul import silu_mul

log = structlog.get_logger()

_NUM_CHECKED = 5  # rows
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of the largest


class FusedNorm(nn.Module):
    """A root-mean-square norm whose weight is applied last, in one launch."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.weight = stock.weight
        self.eps = float(stock.variance_epsilon)

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, N) to (…, N)."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        return residual_rmsnorm(rows, None, self.weight, self.eps).view(hidden.shape)


class Merged(nn.Module):
    """Products of the same rows as one. Their weights become views of it: none is there twice."""

    def __init__(self, parts: Sequence[Any]) -> None:
        super().__init__()
        weights = [part.weight for part in parts]
        self.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        views: Any = torch.split(self.weight, [len(weight) for weight in weights])
        biases = [
            w.new_zeros(len(w)) if p.bias is None else p.bias
            for p, w in zip(parts, weights, strict=True)
        ]
        self.bias = torch.cat(biases) if any(p.bias is not None for p in parts) else None
        for part, view in zip(parts, views, strict=True):
            part.weight = nn.Parameter(view, requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        """(T, inputs) to (T, outputs of all parts)."""
        return functional.linear(rows, self.weight, self.bias)


class FusedMLP(nn.Module):
    """An MLP gated by silu: gate and up in one product, and both of what follows in one launch."""

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.gate_up = Merged([stock.gate_proj, stock.up_proj])
        self.down_proj = stock.down_proj

    def forward(self, hidden: Tensor) -> Tensor:
        """(…, hidden) to (…, hidden)."""
        gate_up = self.gate_up(hidden.reshape(-1, hidden.shape[-1]))
        down: Tensor = self.down_proj(silu_mul(gate_up))
        return down.view(hidden.shape)


@torch.inference_mode()
def fuse(model: LoadedModel) -> None:
    """Replace what can be replaced in a model of the GPU, one module after the other."""
    counts = {"norms": 0, "mlps": 0}
    for parent, name in _places(model.module):  # holds no stock module: its memory is needed
        stock = getattr(parent, name)
        kind, _, make, size_of = next(kind for kind in _KINDS if kind[1](stock))
        fused = make(stock)
        if _says_the_same(fused, stock, size_of(stock), model):
            setattr(parent, name, fused)
            counts[kind] += 1
    log.info("model_fused", **counts)


def _places(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where modules are that have a fused form: their parents, and their names there."""
    return [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if any(knows(child) for _, knows, _, _ in _KINDS)
    ]


def _is_norm(module: Any) -> bool:
    names = [name for name, _ in module.named_parameters()]
    return hasattr(module, "variance_epsilon") and names == ["weight"] and module.weight.ndim == 1


def _is_gated_mlp(module: Any) -> bool:
    parts = dict(module.named_children())
    is_complete = {"gate_proj", "up_proj", "down_proj", "act_fn"} == set(parts)
    return is_complete and all(
        isinstance(part, nn.Linear) for name, part in parts.items() if name != "act_fn"
    )


def _says_the_same(fused: nn.Module, stock: nn.Module, size: int, model: LoadedModel) -> bool:
    """Whether both say the same of random rows; a kernel that refuses the shape does not."""
    shape = 1, _NUM_CHECKED, size
    random = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    hidden = random.to(model.device, model.dtype)
    expected = stock(hidden).float()
    try:
        error = (fused(hidden).float() - expected).abs().max()
    except ValueError:
        return False
    return bool(error <= _TOLERANCES[model.dtype] * expected.abs().max())


_Kind = tuple[str, Callable[[Any], bool], Callable[[Any], nn.Module], Callable[[Any], int]]
_KINDS: tuple[_Kind, ...] = (
    ("norms", _is_norm, FusedNorm, lambda stock: len(stock.weight)),
    ("mlps", _is_gated_mlp, FusedMLP, lambda stock: stock.gate_proj.in_features),
)
