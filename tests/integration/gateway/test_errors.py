"""What a client gets when something is wrong with its request or with the engine."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.app_keys import ENGINE
from tests.fakes.gateway_world import (
    World,
    ids_of,
    make_world,
)
from tests.fakes.scripted_engine import Script, saying
from wire.config import Settings

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


async def test_a_full_queue_is_a_429_and_queues_nothing(world: World) -> None:
    engine = world.engine
    status, body = await world.complete("x", n=9)
    assert status == 400
    assert "MAX_QUEUED_REQUESTS" in body["error"]["message"]
    engine.be_silent()
    waiting = [asyncio.ensure_future(world.complete("x")) for _ in range(8)]
    await engine.wait_for(lambda: engine.num_running == 8)
    url = world.url + "/v1/completions"
    async with world.http.post(url, json={"prompt": "x"}) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["type"] == "rate_limit_error"
    engine.talk()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 8
    assert len(engine.requests) == 8
    assert (await world.complete("x"))[0] == 200
    assert not engine.aborts  # what was never queued needs none


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_who_comes_to_a_full_queue_is_refused_unread(world: World, path: str) -> None:
    """But for one whose answer may be there already."""
    engine, url = world.engine, world.url + path
    engine.be_silent()
    waiting = [asyncio.ensure_future(world.complete("x")) for _ in range(8)]
    await engine.wait_for(lambda: engine.num_running == 8)

    async def status(data: bytes, **more: str) -> int:
        headers = {"Content-Type": "application/json", **more}
        async with world.http.post(url, data=data, headers=headers) as response:
            return int(response.status)

    while await status(b"nonsense") != 429:  # it is known for a moment, and then found out again
        assert (await world.complete("x"))[0] == 429
    assert await status(b"nonsense", **{"Idempotency-Key": "k"}) == 400
    engine.talk()
    await asyncio.gather(*waiting)
    assert await status(b"nonsense") == 400


async def test_a_full_queue_says_when_to_come_again(world: World) -> None:
    engine, rate = world.engine, world.app[ENGINE]._rate
    await world.complete("x", max_tokens=4)  # 2 tokens
    for second in range(3):  # 2 tokens a second
        stats = {"num_requests_running": "1", "generation_tokens_total": str(2 * second)}
        rate.note(stats, float(second))
    engine.be_silent()
    waiting = [asyncio.ensure_future(world.complete("x")) for _ in range(8)]
    await engine.wait_for(lambda: engine.num_running == 8)
    async with world.http.post(world.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "8")
    engine.talk()
    await asyncio.gather(*waiting)


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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nothing"])
@pytest.mark.parametrize(
    ("expected", "status"), [("\udcff\udcfe", 417), ("more", 417), ("100-Continue", None)]
)
async def test_only_what_can_be_met_may_be_expected(
    world: World, path: str, expected: str, status: int | None
) -> None:
    """An expectation that is no text is no reason to fail."""
    host, port = world.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nExpect: {expected}\r\n\r\n"
    writer.write(head.encode(errors="surrogateescape"))
    line = await reader.readline()
    if status is None:
        assert line == b"HTTP/1.1 100 Continue\r\n"
    else:
        assert line.startswith(b"HTTP/1.1 417 ")
        head_lines = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = int(re.findall(r"Content-Length: (\d+)", head_lines)[0])
        assert json.loads(await reader.readexactly(size))["error"]["param"] == "Expect"
    writer.close()
