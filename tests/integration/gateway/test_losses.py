"""What the gateway does without what it stands on: Redis, its model folder, the pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway import patience
from gateway.app import create_app
from gateway.app_keys import BACKGROUND, READINESS
from tests.fakes.gateway_world import (
    TOKENIZER,
    World,
    begin,
    ids_of,
    make_world,
    parse_events,
    serving,
    until,
)
from tests.fakes.past_the_bus import command
from tests.fakes.redis_server import RedisServer
from tests.fakes.scripted_engine import saying
from tests.fakes.tokenizers import write_model_folder
from wire.bus import Bus, BusError
from wire.config import Settings, load

pytestmark = pytest.mark.redis


@pytest.fixture
async def durable(redis_kind: str, model_folder: Path) -> AsyncIterator[tuple[RedisServer, World]]:
    """A world on a Redis that keeps its data when it is restarted."""
    server = RedisServer(redis_kind, aof=True)
    try:
        settings = load(redis_url=server.url, model=str(model_folder))
        async with make_world(settings, keep_alive_s=0.05) as world:
            yield server, world
    finally:
        server.close()


async def test_a_request_waits_for_a_redis_that_comes_back(
    durable: tuple[RedisServer, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, world = durable
    attempts = asyncio.Semaphore(0)
    submit = world.bus.submit

    async def attempt(*args: Any, **options: Any) -> list[int]:
        attempts.release()
        return await submit(*args, **options)

    monkeypatch.setattr(world.bus, "submit", attempt)
    await asyncio.to_thread(server.stop)
    answer = asyncio.ensure_future(world.complete("x", max_tokens=50))
    await attempts.acquire()
    await attempts.acquire()
    await asyncio.to_thread(server.start)
    status, body = await answer
    assert (status, body["choices"][0]["text"]) == (200, "hello world")
    assert len(world.engine.requests) == 1


async def test_a_stream_goes_on_after_redis_was_away(durable: tuple[RedisServer, World]) -> None:
    server, world = durable
    ids = ids_of("hello world, how are you today?")
    world.engine.script = saying(ids)
    world.engine.be_silent()
    url = world.url + "/v1/completions"
    async with world.http.post(url, json={"prompt": "x", "max_tokens": 99, "stream": True}) as got:
        pass_one = asyncio.ensure_future(got.text())
        await world.engine.wait_for(lambda: world.engine.num_running == 1)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        world.engine.talk()
        events = parse_events(await pass_one)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == TOKENIZER.decode(ids)


async def test_an_abort_is_published_once_redis_is_back(
    durable: tuple[RedisServer, World],
) -> None:
    server, world = durable
    engine = world.engine
    engine.be_silent()
    writer = await begin(world, {"prompt": "x"})
    await engine.wait_for(lambda: engine.num_running == 1)
    await asyncio.to_thread(server.stop)
    writer.close()
    await until(lambda: world.app[READINESS].problem is not None)
    await asyncio.to_thread(server.start)
    await engine.wait_for(lambda: len(engine.aborts) == 1)
    assert engine.aborts[0].req_id == engine.requests[0].req_id


async def test_a_redis_that_stays_away_is_a_503(
    durable: tuple[RedisServer, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, world = durable
    monkeypatch.setattr(patience, "PATIENCE_S", 0.2)
    await asyncio.to_thread(server.stop)
    async with world.http.post(world.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert (await response.json())["error"]["type"] == "service_unavailable_error"
    await asyncio.to_thread(server.start)
    assert (await world.complete("x"))[0] == 200


async def test_a_redis_that_is_full_is_a_503_until_there_is_room(world: World) -> None:
    await command(world.bus, "CONFIG", "SET", "maxmemory", 1)
    status, body = await world.complete("x")
    assert (status, body["error"]["code"]) == (503, "unavailable")
    assert "full" in body["error"]["message"]
    await command(world.bus, "CONFIG", "SET", "maxmemory", 0)
    assert (await world.complete("x"))[0] == 200
    assert not world.engine.aborts


async def test_a_gateway_without_its_model_lives_but_is_not_ready(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = make_settings(model="org/name", model_cache_dir=tmp_path)
    bus = Bus.connect(settings)
    app = create_app(settings, bus)
    async with serving(app) as url, aiohttp.ClientSession() as http:
        async with http.get(url + "/health") as response:
            assert response.status == 200
            assert (await response.json())["status"] == "degraded"
        async with http.get(url + "/ready") as response:
            assert response.status == 503
        async with http.post(url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
        async with http.get(url + "/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] is None
        async with http.get(url + "/metrics") as response:
            assert response.status == 200
        write_model_folder(tmp_path / "new").rename(tmp_path / "org--name")
        await until(lambda: app[READINESS].model is not None)
        async with http.get(url + "/ready") as response:
            assert response.status == 503
            message = (await response.json())["error"]["message"]
            assert "scheduler" in message
    await bus.close()


async def test_readiness_follows_the_pool(world: World) -> None:
    async def problem() -> str | None:
        async with world.http.get(world.url + "/ready") as response:
            body = await response.json()
            assert response.status == (200 if "error" not in body else 503)
            return body["error"]["message"] if "error" in body else None

    assert await problem() is None
    await world.engine.be_ready("another model")
    await until(lambda: world.app[READINESS].problem is not None)
    assert "another model" in str(await problem())
    await world.bus.leave("worker", "scripted")
    await until(lambda: "no worker" in str(world.app[READINESS].problem))
    await world.bus.leave("scheduler", "scripted")
    await until(lambda: "no scheduler" in str(world.app[READINESS].problem))
    async with world.http.get(world.url + "/health") as response:
        assert response.status == 200
    assert (await world.complete("x"))[0] == 200  # requests wait for a pool that comes back


async def test_a_background_task_that_dies_is_known(world: World) -> None:
    failing = asyncio.ensure_future(world.app[BACKGROUND].failure())
    await world.complete("x")
    [gateway] = world.engine.gateways
    await command(world.bus, "SET", world.bus.keys.out(gateway), "no stream")
    async with asyncio.timeout(20):
        with pytest.raises(BusError, match="WRONGTYPE"):
            await failing
