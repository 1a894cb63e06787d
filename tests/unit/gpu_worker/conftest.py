"""Tiny models on disk, made once, and workers' insides on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_worker import sampler
from gpu_worker.attention.torch import TorchAttention
from gpu_worker.input_batch import Capacity
from gpu_worker.model_loader import LoadedModel, load_model
from gpu_worker.model_runner import ModelRunner
from gpu_worker.sampler import SamplerOutput, SamplingMetadata, sample
from tests.fakes import tiny_models
from wire.config import load

BLOCK = 16


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, by the name of its architecture."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            config = tiny_models.ARCHITECTURES[name]()
            made[name] = tiny_models.save(config, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture
def tiny_model(tiny_folder: Callable[[str], Path]) -> Callable[[str], LoadedModel]:
    """A tiny model as the worker loads it, in float32."""

    def model(name: str) -> LoadedModel:
        return load_model(load(dtype="float32", device="cpu"), tiny_folder(name))

    return model


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

    def watched(logits: Tensor, metadata: SamplingMetadata | None) -> SamplerOutput:
        seen.append(logits.clone())
        return sample(logits, metadata)

    monkeypatch.setattr(sampler, "sample", watched)
    yield seen
