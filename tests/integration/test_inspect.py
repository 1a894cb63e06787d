"""What people see of a pool, from a real Redis."""

from __future__ import annotations

import asyncio
import io
import socket
import time

from rich.console import Console

from pagestream.inspect import Process, is_healthy, overview, show
from pagestream.tail import follow
from tests.fakes.past_the_bus import command
from wire.bus import Bus
from wire.config import Settings
from wire.messages import AbortRequest, EngineCoreRequest, SamplingParams, token_ids


async def beat(bus: Bus, role: str, name: str, **fields: str | int) -> None:
    said = {"pid": 42, "host": socket.gethostname(), "started_ms": 0, **fields}
    await bus.beat(role, name, "abcd", said, ttl_s=60)


async def test_every_process_is_listed_with_what_it_says(settings: Settings, bus: Bus) -> None:
    started_ms = round(time.time() * 1000) - 90_000
    await beat(bus, "worker", "w", state="ready", epoch=7, started_ms=started_ms)
    await beat(bus, "gateway", "g", state="loading")
    await beat(bus, "scheduler", "s", state="leader", epoch=7)
    seen = await overview(settings)
    assert [one.role for one in seen.processes] == ["gateway", "scheduler", "worker", "redis"]
    gateway, _, worker, redis = seen.processes
    host = socket.gethostname()
    assert worker.uptime_s is not None
    assert 90 <= worker.uptime_s < 100
    assert worker == Process("worker", "w", 42, host, "abcd", 7, "ready", worker.uptime_s)
    assert (gateway.state, gateway.epoch) == ("loading", None)
    assert redis.pid is not None
    assert redis.state == "ready"


async def test_a_process_that_fell_silent_is_lost(settings: Settings, bus: Bus) -> None:
    await beat(bus, "worker", "w", state="ready")
    await command(bus, "DEL", bus.keys.process("worker", "w"))  # as when its TTL ends
    (worker,) = (one for one in (await overview(settings)).processes if one.role == "worker")
    assert worker == Process("worker", "w", None, None, None, None, "lost", None)


async def test_queues_are_counted(settings: Settings, bus: Bus) -> None:
    await beat(bus, "worker", "w", state="ready")
    await bus.abort(AbortRequest("r"))
    await command(bus, "ZADD", bus.keys.running("w"), 1, "a", 2, "b")
    queues = (await overview(settings)).queues
    assert (queues["requests"], queues["waiting"], queues["running:w"]) == (1, 0, 2)


async def test_the_tables_show_processes_and_queues(settings: Settings, bus: Bus) -> None:
    await beat(bus, "worker", "worker-7", state="ready")
    page = io.StringIO()
    show(await overview(settings), Console(file=page, width=200))
    assert "worker-7" in page.getvalue()
    assert "running:worker-7" in page.getvalue()


async def test_health_asks_for_a_process_on_this_host_that_does_its_work(
    settings: Settings, bus: Bus
) -> None:
    await beat(bus, "worker", "elsewhere", state="ready", host="another")
    assert not await is_healthy(settings, "worker")
    await beat(bus, "worker", "here", state="loading")
    assert not await is_healthy(settings, "worker")
    await beat(bus, "worker", "here", state="ready")
    assert await is_healthy(settings, "worker")


async def test_tail_shows_what_is_there_and_what_comes(settings: Settings, bus: Bus) -> None:
    await submit(bus, "first")
    lines = follow(settings, "requests")
    async with asyncio.timeout(20):
        assert "req_id='first'" in await anext(lines)
        await submit(bus, "second")
        assert "req_id='second'" in await anext(lines)
    await lines.aclose()


async def test_tail_of_all_steps_follows_every_worker(settings: Settings, bus: Bus) -> None:
    for name in ("v", "w"):
        await beat(bus, "worker", name, state="ready")
        await command(bus, "XADD", bus.keys.steps(f"{name}.abcd"), "7-1", "decodes", 0)
    lines = follow(settings, "steps")
    async with asyncio.timeout(20):
        seen = {(await anext(lines)).split()[1] for _ in range(2)}
    await lines.aclose()
    assert seen == {"steps:v.abcd", "steps:w.abcd"}


async def submit(bus: Bus, req_id: str) -> None:
    request = EngineCoreRequest(
        req_id,
        "g.1",
        1,
        token_ids([1, 2]),
        SamplingParams(max_tokens=1),
        output_token_ids=token_ids(),
    )
    await bus.submit([request], limit=10, retention_s=60)
