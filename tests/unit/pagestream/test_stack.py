"""How a stack starts and ends when its services do not do as they should; they are scripts here."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pagestream import stack
from pagestream.plan import Service
from pagestream.stack import Stack
from tests.fakes.scheduler_pool import eventually
from wire.bus import Bus
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


async def test_it_is_ready_once_a_service_of_its_own_of_each_role_serves(
    on_redis: Settings,
    screen: Notes,
    bus: Bus,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its gateway answers before: the heart of a worker of an earlier life may still beat."""

    async def is_ready(*_: Any, **__: Any) -> bool:
        return True

    monkeypatch.setattr(stack, "is_ready", is_ready)
    made = Stack(on_redis, screen)
    running = asyncio.ensure_future(
        made.run(None, None, [service(role, FOR_EVER) for role in ("worker", "gateway")])
    )

    async def says(role: str, state: str) -> None:
        pids = {one.service.role: one.pid for one in made._children}
        await bus.beat(role, role, "life", {"pid": pids[role], "state": state}, 60)

    async def are_started() -> bool:
        return len([one for one in made._children if one.pid]) == 2

    async def is_shown() -> bool:
        return ("gateway", "ready") in screen.states

    async def is_up() -> bool:
        return "ready http://" in capfd.readouterr().out

    await eventually(are_started)
    await says("worker", "loading")
    await says("gateway", "ready")
    await eventually(is_shown)
    await asyncio.sleep(0.3)
    assert not await is_up()
    await says("worker", "ready")
    await eventually(is_up)
    made._ask_to_stop()
    assert await running == 0


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
