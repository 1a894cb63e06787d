"""What every test may ask for: a private Redis, its address, settings, and a Bus on it.

`--redis all` runs each test that needs Redis on every kind of server; a test marked `every_redis`
always does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.fakes import reaper
from tests.fakes.redis_server import KINDS, RedisServer, find_binary
from wire.bus import Bus
from wire.config import PREFIX, Settings, load
from wire.connection import Connection


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--redis",
        default="auto",
        choices=("auto", "all", *KINDS),
        help="kind of server to test on; auto: the first that is found",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Leave nothing behind: SIGTERM is as Ctrl-C, and what no clean-up reaches is killed."""
    reaper.watch()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    config.addinivalue_line("markers", "every_redis: runs on every kind of Redis server")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long ones out unless they are asked for."""
    if "long" in config.getoption("markexpr"):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "redis_kind" not in metafunc.fixturenames:
        return
    found = [kind for kind in KINDS if find_binary(kind)]
    choice = metafunc.config.getoption("--redis")
    if choice == "auto" and not metafunc.definition.get_closest_marker("every_redis"):
        kinds = found[:1] or list(KINDS[:1])
    else:
        kinds = list(KINDS) if choice in {"auto", "all"} else [choice]
    metafunc.parametrize("redis_kind", [_unless_missing(kind, found) for kind in kinds])


def _unless_missing(kind: str, found: list[str]) -> Any:
    missing = pytest.mark.skipif(kind not in found, reason=f"no {kind} server is installed")
    return pytest.param(kind, marks=missing)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see the defaults, whatever the shell and the folder that run them have set."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setitem(Settings.model_config, "env_file", None)


@pytest.fixture
def redis_server(redis_kind: str) -> Iterator[RedisServer]:
    """A server of the test's own, without AOF."""
    server = RedisServer(redis_kind)
    yield server
    server.close()


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
def make_settings(redis_url: str) -> Callable[..., Settings]:
    """Settings on the test's Redis; keyword arguments are further settings."""

    def make(**overrides: object) -> Settings:
        return load(redis_url=redis_url, **overrides)

    return make


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings()


@pytest.fixture
async def bus(settings: Settings) -> AsyncIterator[Bus]:
    connected = Bus.connect(settings)
    yield connected
    await connected.close()


@pytest.fixture
async def redis(settings: Settings) -> AsyncIterator[Connection]:
    """The server beside the bus, for what the bus has no words for."""
    connection = Connection(settings)
    yield connection
    await connection.close()
