"""Tiny models on disk, made once, and as the worker loads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from wire.config import load

if TYPE_CHECKING:  # transformers takes seconds to load, and most tests have no use for it
    from gpu_worker.model_loader import LoadedModel


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, by the name of its architecture."""
    from tests.fakes import tiny_models  # noqa: PLC0415 - transformers, see above

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
    from gpu_worker.model_loader import load_model  # noqa: PLC0415 - transformers, see above

    return lambda name: load_model(load(dtype="float32", device="cpu"), tiny_folder(name))
