"""What a client gets when something is wrong: its request, the engine, or Redis."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import engine_client
from gateway.app import create_app
from tests.fakes.gateway_world import (
    TOKENIZER,
    World,
    ids_of,
    make_world,
    parse_events,
)
from tests.fakes.redis_server import RedisServer
from tests.fakes.scripted_engine import Script, saying
from wire.bus import Bus, BusError
from wire.config import Settings, load
from wire.messages import EngineCoreOutputs, token_ids

pytestmark = pytest.mark.redis


@pytest.mark.parametrize(
    ("code", "status"), [("invalid", 400), ("unavailable", 503), ("internal", 500)]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_byte_is_a_status(
    world: World, stream: bool, code: str, status: int
) -> None:
    world.engine.script = saying([], finish_reason="error", error="no room", error_code=code)
    found, body = await world.complete("x", stream=stream)
    assert (found, body["error"]["message"]) == (status, "no room")
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not world.engine.aborts


async def test_an_error_after_the_first_byte_is_an_event(world: World) -> None:
    world.engine.script = saying(
        ids_of("hello world"), finish_reason="error", error="broken", error_code="internal"
    )
    *chunks, error, done = await world.events("/v1/completions", {"prompt": "x", "max_tokens": 50})
    assert done == "[DONE]"
    assert error["error"]["message"] == "broken"
    assert chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_an_error_of_one_choice_ends_the_others(world: World) -> None:
    fails = Script([], "error", error="broken", error_code="internal")
    works = Script(ids_of("hello"), None)
    world.engine.script = lambda request: works if request.sampling.seed % 2 else fails
    status, body = await world.complete("x", n=2, seed=10)
    assert (status, body["error"]["message"]) == (500, "broken")
    await world.engine.wait_for(lambda: bool(world.engine.aborts))
    odd = [r.req_id for r in world.engine.requests if r.sampling.seed % 2]
    assert [abort.req_id for abort in world.engine.aborts] == odd


async def test_a_missing_token_ends_a_request_with_an_error(world: World) -> None:
    world.engine.script = saying(ids_of("hello"), finish_reason=None)
    answer = asyncio.ensure_future(world.complete("x", max_tokens=50))
    await world.engine.wait_for(lambda: world.engine.num_running == 1)
    [request] = world.engine.requests
    gap = EngineCoreOutputs(token_ids([request.handle]), token_ids([20]), token_ids([5]))
    await world.engine.send(request.gateway, gap)
    status, body = await answer
    assert status == 500
    assert "lost" in body["error"]["message"]
    await world.engine.wait_for(lambda: bool(world.engine.aborts))


async def test_a_full_queue_is_a_429_and_queues_nothing(world: World) -> None:
    engine = world.engine
    engine.be_silent()
    waiting = [asyncio.ensure_future(world.complete("x")) for _ in range(8)]
    await engine.wait_for(lambda: engine.num_running == 8)
    url = world.url + "/v1/completions"
    async with world.http.post(url, json={"prompt": "x"}) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["type"] == "rate_limit_error"
    status, body = await world.complete("x", n=9)
    assert status == 400
    assert "MAX_QUEUED_REQUESTS" in body["error"]["message"]
    engine.talk()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 8
    assert len(engine.requests) == 8
    assert (await world.complete("x"))[0] == 200


async def test_siblings_are_queued_together_or_not_at_all(world: World) -> None:
    engine = world.engine
    engine.be_silent()
    waiting = [asyncio.ensure_future(world.complete("x")) for _ in range(6)]
    await engine.wait_for(lambda: engine.num_running == 6)
    assert (await world.complete("x", n=3))[0] == 429
    engine.talk()
    await asyncio.gather(*waiting)
    assert len(engine.requests) == 6


BAD_BODIES = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b'{"prompt": NaN}', 400),
    (b'{"prompt": "x", "temperature": 1e400}', 400),
    (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
    (b'{"prompt": "' + b"x" * 2_000_000 + b'"}', 413),
]


@pytest.mark.parametrize(("raw", "status"), BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_a_body_that_is_no_request_is_refused(
    make_settings: Callable[..., Settings], model_folder: Path, raw: bytes, status: int
) -> None:
    settings = make_settings(model=str(model_folder), max_body_bytes=1_000_000)
    headers = {"Content-Type": "application/json"}
    async with make_world(settings) as world:
        url = world.url + "/v1/completions"
        async with world.http.post(url, data=io.BytesIO(raw), headers=headers) as response:
            assert response.status == status
            text = await response.text()
        error = json.loads(text, parse_constant=pytest.fail)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not world.engine.requests
        assert (await world.complete("x"))[0] == 200


async def test_other_content_is_refused(world: World) -> None:
    url = world.url + "/v1/completions"
    async with world.http.post(url, data={"prompt": "x"}) as response:
        assert response.status == 400
        assert "application/json" in (await response.json())["error"]["message"]
    gzip = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with world.http.post(url, data=b"this is not gzip", headers=gzip) as response:
        assert response.status == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("DELETE", "/health", 405),
    ],
)
async def test_a_wrong_path_or_method_has_an_openai_body(
    world: World, method: str, path: str, status: int
) -> None:
    async with world.http.request(method, world.url + path) as response:
        assert response.status == status
        assert (status == 405) == ("Allow" in response.headers)
        assert (await response.json())["error"]["message"]


# ---------------------------------------------------------------- Redis


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
    monkeypatch.setattr(engine_client, "SUBMIT_PATIENCE_S", 0.2)
    await asyncio.to_thread(server.stop)
    async with world.http.post(world.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert (await response.json())["error"]["type"] == "service_unavailable_error"
    await asyncio.to_thread(server.start)
    assert (await world.complete("x"))[0] == 200


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
    other = Bus.connect(world.settings)
    await world.bus.write([("SET", world.bus.keys.out(world.gateway), "no stream")])
    async with asyncio.timeout(20):
        with pytest.raises(BusError, match="WRONGTYPE"):
            await failing
    await other.close()
