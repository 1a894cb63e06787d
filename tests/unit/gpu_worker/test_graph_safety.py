"""What a CUDA graph can hold: a forward that asks the device for no number on its way.

Tensors without numbers stand in for those of a GPU: whatever wanted to look at one would fail.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_worker.model_loader import LoadedModel, _Probe

FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "gpt_neox",
    "gpt2",
]


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_a_forward_reads_nothing_back(name: str, tiny_model: Callable[[str], LoadedModel]) -> None:
    model = tiny_model(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(4, dtype=torch.int64)
        logits = model.forward(ids, torch.zeros_like(ids), torch.arange(4), _Probe())
    assert logits.shape == (4, model.vocab_size)


def test_a_look_at_a_number_would_be_seen() -> None:
    with FakeTensorMode(), pytest.raises(Exception, match="_local_scalar_dense"):
        bool(torch.zeros(3).any())
