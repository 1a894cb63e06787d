"""Workers' insides on tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_worker import sampler
from gpu_worker.attention.torch import TorchAttention
from gpu_worker.model_loader import LoadedModel
from gpu_worker.model_runner import ModelRunner
from gpu_worker.request_states import Capacity
from gpu_worker.sampler import SamplingMetadata, sample
from tests.fakes import tiny_models

BLOCK = 16


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are kept that were compiled once for all tests, as in a cache of models."""
    return tmp_path_factory.mktemp("models") / "kernels"


@pytest.fixture
def make_runner(tiny_model: Callable[[str], LoadedModel]) -> Callable[..., ModelRunner]:
    def make(name: str = "llama", num_blocks: int = 64, max_num_seqs: int = 16) -> ModelRunner:
        model = tiny_model(name)
        backend = TorchAttention(BLOCK, torch.float32, model.device)
        capacity = Capacity(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=tiny_models.MAX_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            vocab_size=model.vocab_size,
        )
        return ModelRunner(model, backend, capacity)

    return make


@pytest.fixture
def seen_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Logits (N, V) that each step sampled from."""
    seen: list[Tensor] = []

    def watched(logits: Tensor, metadata: SamplingMetadata | None) -> Tensor:
        seen.append(logits.clone())
        return sample(logits, metadata)

    monkeypatch.setattr(sampler, "sample", watched)
    yield seen
