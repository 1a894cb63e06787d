"""A client that left is counted as such and makes no noise, whoever notices it first.

aiohttp cancels the handler of a connection that is lost; a handler that writes or reads at that
moment finds out by itself. Which of the two happens is chance, and must be seen nowhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.fakes.exported import exported
from tests.fakes.gateway_world import World, ids_of, make_world
from tests.fakes.scheduler_pool import eventually
from tests.fakes.scripted_engine import saying
from wire.config import Settings

pytestmark = pytest.mark.redis

ASKED = b'{"prompt": "hello", "max_tokens": 50, "stream": true}'

WHILE = {
    "a stream is written": ("POST /v1/completions", ASKED, len(ASKED)),
    "the console is written": ("GET /console/feed", b"", 0),
    "its body is read": ("POST /v1/completions", ASKED[:10], len(ASKED)),
}
"""What is asked, what is sent of the body, and how long that is said to be."""


@pytest.fixture(params=[True, False], ids=["cancelled", "by itself"])
async def world(
    make_settings: Callable[..., Settings], model_folder: Path, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    settings = make_settings(model=str(model_folder), served_model_name="tiny")
    async with make_world(settings, cancels_handlers=request.param, keep_alive_s=0.02) as made:
        made.engine.script = saying(ids_of("hello"), finish_reason=None)
        yield made


async def responses(world: World) -> dict[str, float]:
    """How many responses there were so far, but for those to this question."""
    start = "pagestream:http_responses_total/"
    found = await exported(world.http, world.url)
    counts = {k.removeprefix(start): v for k, v in found.items() if k.startswith(start)}
    return {k: v for k, v in counts.items() if "/metrics/" not in k}


@pytest.mark.parametrize("doing", WHILE)
async def test_a_client_that_leaves(
    world: World, doing: str, caplog: pytest.LogCaptureFixture
) -> None:
    line, body, length = WHILE[doing]
    host, port = world.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{line} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode())
    writer.write(f"Content-Length: {length}\r\n\r\n".encode() + body)
    if len(body) == length:
        assert b"data: " in await reader.readuntil(b"data: ")
    else:
        await asyncio.sleep(0.05)  # nothing tells that the handler has begun to read
    writer.transport.abort()

    async def is_counted() -> bool:
        return bool(await responses(world))

    await eventually(is_counted)
    assert await responses(world) == {f"{line.replace(' ', '/')}/499": 1}
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    if doing == "a stream is written":
        await world.engine.wait_for(lambda: len(world.engine.aborts) == 1)
