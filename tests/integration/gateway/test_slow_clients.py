"""A client that sends a request byte by byte, or none at all, is waited for only so long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.fakes.gateway_world import PATIENCE_S, parse_events
from tests.fakes.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.redis

LIMIT_S = 1.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture
async def url(start: Callable[..., Any], engine: ScriptedEngine, port: int) -> str:
    gateway = await start(port, client_timeout_s=LIMIT_S)
    await gateway.wait_status("/ready", 200)
    return str(gateway.url)


async def what_comes(port: int, head: bytes, drip: bytes) -> bytes:
    """Say `head`, and `drip` again and again; all that is answered until the other side closes.

    What came before a reset counts: who closes on somebody that still speaks resets.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)

    async def dripping() -> None:
        while drip and not writer.is_closing():
            writer.write(drip)
            await asyncio.sleep(0.1)

    drops = asyncio.ensure_future(dripping())
    answer = b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while some := await reader.read(65536):
                answer += some
    except ConnectionResetError:
        pass
    finally:
        drops.cancel()
        writer.close()
    return answer


@pytest.mark.parametrize(
    ("head", "drip"),
    [(b"", b""), (HEAD, b""), (HEAD, b"X-Slow: 1\r\n")],
    ids=["says nothing", "stops in its headers", "goes on with its headers for ever"],
)
async def test_a_connection_without_a_request_is_closed(
    url: str, port: int, head: bytes, drip: bytes
) -> None:
    assert await what_comes(port, head, drip) == b""


async def test_a_body_that_does_not_end_is_a_408(url: str, port: int) -> None:
    answer = await what_comes(port, HEAD + b"Content-Length: 1000000\r\n\r\n{", b" ")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body took more than 1 s to arrive" in answer


async def test_a_body_in_endless_pieces_is_a_408(url: str, port: int) -> None:
    answer = await what_comes(port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n")
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_an_answer_may_take_longer_than_its_question(
    url: str, port: int, engine: ScriptedEngine
) -> None:
    slow = [asyncio.ensure_future(what_comes(port, HEAD, b"X: 1\r\n")) for _ in range(50)]
    async with aiohttp.ClientSession() as http:
        body = {"prompt": "x", "stream": True}
        engine.be_silent()
        async with http.post(f"{url}/v1/completions", json=body) as response:
            await asyncio.gather(*slow)  # each of which was given up after that time
            engine.talk()
            events = parse_events(await response.text())
    assert events[-1] == "[DONE]"
