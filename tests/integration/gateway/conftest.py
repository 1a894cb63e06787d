"""Model folders, and gateways that serve them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.fakes.api_keys import Keys
from tests.fakes.gateway_pool import FACTS
from tests.fakes.gateway_process import Start, starting
from tests.fakes.gateway_world import TOKENIZER, World, ids_of, make_world
from tests.fakes.running_stack import free_port
from tests.fakes.scripted_engine import ScriptedEngine, saying
from tests.fakes.tokenizers import write_model_folder
from wire.bus import Bus
from wire.config import Settings
from wire.model_store import folder_hash


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model") / "tiny", TOKENIZER)


@pytest.fixture(scope="session")
def oracle_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What gateways read where the worker is an oracle."""
    folder = tmp_path_factory.mktemp("model") / "oracle"
    return write_model_folder(folder, TOKENIZER, config=FACTS)


@pytest.fixture
async def world(make_settings: Callable[..., Settings], model_folder: Path) -> AsyncIterator[World]:
    settings = make_settings(
        model=str(model_folder), served_model_name="tiny", max_queued_requests=8, seed=7
    )
    async with make_world(settings, keep_alive_s=0.05) as made:
        yield made


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
async def start(redis_url: str, model_folder: Path) -> AsyncIterator[Start]:
    """Start gateways as processes."""
    async with starting(redis_url=redis_url, model=model_folder) as begin:
        yield begin


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    made = Keys(tmp_path / "keys.toml")
    made.add("user")
    made.add("other")
    made.add("admin", is_admin=True)
    return made


@pytest.fixture
async def engine(bus: Bus, model_folder: Path) -> AsyncIterator[ScriptedEngine]:
    """What answers gateways that run as processes."""
    async with ScriptedEngine(bus, saying(ids_of("hello world"))) as made:
        await made.be_ready(folder_hash(model_folder))
        yield made
