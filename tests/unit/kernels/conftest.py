"""Kernels run in Triton's interpreter here, on memory that holds NaN until it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton

from tests.fakes import triton_interpreter

triton_interpreter.install()  # before the test modules import kernels


@pytest.fixture
def no_interpreter() -> Iterator[None]:
    """A machine without a GPU, as it is: launchers take the reference, which is much faster."""
    triton.knobs.runtime.__dict__["interpret"] = False  # by name it would reach the environment
    yield
    triton.knobs.runtime.__dict__["interpret"] = True


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, by the name of its architecture."""
    from tests.fakes import tiny_models  # noqa: PLC0415 - transformers takes seconds to load

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            config = tiny_models.ARCHITECTURES[name]()
            made[name] = tiny_models.save(config, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture
def tiny_model(tiny_folder: Callable[[str], Path]) -> Callable[[str], Any]:
    """A tiny model as the worker loads it, in float32."""
    from gpu_worker.model_loader import load_model  # noqa: PLC0415 - likewise
    from wire.config import load  # noqa: PLC0415

    return lambda name: load_model(load(dtype="float32", device="cpu"), tiny_folder(name))


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """What `torch.empty` gives out is NaN, so that reading what nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _silent_arithmetic() -> Iterator[None]:
    """A GPU does not warn of -inf and NaN either."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
