"""A tiny model folder, and a gateway that serves it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.fakes.gateway_world import TOKENIZER, World, make_world
from tests.fakes.tokenizers import write_model_folder
from wire.config import Settings


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model") / "tiny", TOKENIZER)


@pytest.fixture
async def world(make_settings: Callable[..., Settings], model_folder: Path) -> AsyncIterator[World]:
    settings = make_settings(
        model=str(model_folder), served_model_name="tiny", max_queued_requests=8, seed=7
    )
    async with make_world(settings, keep_alive_s=0.05) as made:
        yield made
