"""Kernels run in Triton's interpreter here, on memory that holds NaN until it is written."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton

import kernels
from tests.fakes import triton_interpreter

triton_interpreter.install()
for module in pkgutil.iter_modules(kernels.__path__, "kernels."):
    importlib.import_module(module.name)  # now: whether it is interpreted is decided here


@pytest.fixture
def no_interpreter() -> Iterator[None]:
    """A machine without a GPU, as it is: launchers take the reference, which is much faster."""
    triton.knobs.runtime.__dict__["interpret"] = False  # by name it would reach the environment
    yield
    triton.knobs.runtime.__dict__["interpret"] = True


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
