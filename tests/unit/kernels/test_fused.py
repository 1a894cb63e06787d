"""A model whose norms and MLPs run by kernels says what the stock one says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker import fused
from gpu_worker.fused import FusedMLP, FusedNorm, Merged, fuse
from gpu_worker.model_loader import _Probe, load_model
from wire.config import load

pytestmark = pytest.mark.usefixtures("no_interpreter")

COUNTS = {  # norms, MLPs; of two layers each
    "llama": (5, 2),
    "mistral": (5, 2),
    "qwen2": (5, 2),
    "qwen3": (9, 2),
    "gemma2": (0, 0),  # its norms add one to their weights, and its MLPs use another function
    "phi3": (5, 0),  # gate and up are one matrix already
    "gpt_neox": (0, 0),
    "gpt2": (0, 0),
}


def logits_of(model: Any) -> torch.Tensor:
    ids = torch.arange(12) * 5
    with torch.inference_mode():
        return model.forward(ids, torch.arange(12), torch.arange(12), _Probe())


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fused_model_says_what_the_stock_one_says(
    name: str, dtype: str, tiny_folder: Callable[[str], Path]
) -> None:
    model = load_model(load(dtype=dtype, device="cpu"), tiny_folder(name))
    expected = logits_of(model)
    fuse(model)
    kinds = [type(module) for module in model.module.modules()]
    assert (kinds.count(FusedNorm), kinds.count(FusedMLP)) == COUNTS[name]
    tolerance = 1e-4 if dtype == "float32" else 0.1 * float(expected.abs().max())
    torch.testing.assert_close(logits_of(model), expected, atol=tolerance, rtol=0)


def test_parts_of_which_only_one_has_a_bias_are_merged() -> None:
    parts = [torch.nn.Linear(8, 3), torch.nn.Linear(8, 4, bias=False)]
    rows = torch.randn(5, 8)
    torch.testing.assert_close(Merged(parts)(rows), torch.cat([p(rows) for p in parts], dim=1))


def test_what_says_something_else_stays(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "silu_mul", lambda gate_up: gate_up.chunk(2, dim=-1)[0])
    real = fused.residual_rmsnorm
    monkeypatch.setattr(fused, "residual_rmsnorm", lambda *operands: real(*operands) * 1.01)
    model = tiny_model("llama")
    expected = logits_of(model)
    fuse(model)
    assert not any(isinstance(m, FusedNorm | FusedMLP) for m in model.module.modules())
    assert torch.equal(logits_of(model), expected)
