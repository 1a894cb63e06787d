"""How a stack starts and ends when its services do not do as they should; they are scripts here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pagestream.plan import Service
from pagestream.stack import Stack
from wire.config import Settings, load
from wire.connection import Connection

FOR_EVER = "import signal; signal.pause()"


class Notes:
    """A screen that remembers."""

    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.events: list[str] = []
        self.lines: list[tuple[str, str]] = []

    def state(self, name: str, text: str, *, is_done: bool = False) -> None:
        self.states.append((name, text))

    def event(self, text: str) -> None:
        self.events.append(text)

    def log_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def settle(self) -> None:
        pass


def service(role: str, script: str) -> Service:
    return Service(role, role, (sys.executable, "-c", script), dict(os.environ))


def ends_with(code: int, sentence: str) -> str:
    return f"import sys; print({sentence!r}, file=sys.stderr); sys.exit({code})"


@pytest.fixture
def screen() -> Notes:
    return Notes()


@pytest.fixture
def on_redis(redis_url: str, tmp_path: Path) -> Settings:
    return load(redis_url=redis_url, data_dir=tmp_path, port=1)


async def test_a_refused_setting_ends_the_start_with_2_and_the_sentence_of_the_service(
    on_redis: Settings, screen: Notes
) -> None:
    services = [
        service("scheduler", FOR_EVER),
        service("worker", ends_with(2, "worker: DTYPE=x: no such type")),
    ]
    assert await Stack(on_redis, screen).run(None, None, services) == 2
    assert screen.events == ["pagestream: worker: DTYPE=x: no such type"]


async def test_a_service_that_cannot_start_ends_the_start_with_1_after_some_tries(
    on_redis: Settings, screen: Notes
) -> None:
    services = [service("worker", ends_with(1, "worker: out of memory"))]
    assert await Stack(on_redis, screen).run(None, None, services) == 1
    assert screen.events[-1] == "pagestream: worker: out of memory"
    assert screen.lines == [("worker", "worker: out of memory")] * 3


@pytest.mark.parametrize(("code", "expected"), [(2, 2), (1, 1), (7, 1)])
async def test_nothing_is_started_without_a_model(
    code: int, expected: int, on_redis: Settings, screen: Notes
) -> None:
    model = service("model", ends_with(code, "pagestream: MODEL=x: not found"))
    services = [service("scheduler", FOR_EVER)]
    assert await Stack(on_redis, screen).run(model, None, services) == expected
    assert screen.events == ["pagestream: MODEL=x: not found"]
    assert {name for name, _ in screen.states} == {"model"}


async def test_a_redis_that_may_evict_is_refused_by_name(
    on_redis: Settings, screen: Notes, redis_policy: None
) -> None:
    services = [service("scheduler", FOR_EVER)]
    assert await Stack(on_redis, screen).run(None, None, services) == 2
    assert screen.events[0].startswith(f"pagestream: REDIS_URL={on_redis.redis_url}: ")
    assert "noeviction" in screen.events[0]


@pytest.fixture
async def redis_policy(redis: Connection) -> None:
    """Make the server one that forgets what it likes."""
    await redis.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
