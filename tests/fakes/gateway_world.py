"""A gateway over HTTP, a real Redis, and an engine that follows a script behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
from aiohttp import web

from gateway.app import create_app
from gateway.app_keys import READINESS
from tests.fakes.scripted_engine import ScriptedEngine, saying
from tests.fakes.tokenizers import byte_level_tokenizer
from wire.bus import Bus
from wire.config import Settings
from wire.model_store import folder_hash

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")
PATIENCE_S = 20.0
PATIENCE = aiohttp.ClientTimeout(total=PATIENCE_S)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


@dataclass
class World:
    """A gateway that serves, and the engine behind it."""

    url: str
    app: web.Application
    engine: ScriptedEngine
    http: aiohttp.ClientSession
    bus: Bus
    settings: Settings

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Any = "hello", **options: Any) -> tuple[int, dict[str, Any]]:
        return await self.post("/v1/completions", {"prompt": prompt, **options})

    async def chat(self, text: str = "hello", **options: Any) -> tuple[int, dict[str, Any]]:
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"messages": messages, **options})

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream; the end mark is the string."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return parse_events(await response.text())

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)


def parse_events(text: str) -> list[Any]:
    events = []
    for block in text.split("\n\n")[:-1]:
        if not block:  # it keeps the connection alive
            continue
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    assert text.endswith("\n\n")
    return events


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(app: web.Application, *, cancels_handlers: bool = True) -> AsyncIterator[str]:
    """Serve on a free port. Without `cancels_handlers`, who writes finds out that nobody reads."""
    runner = web.AppRunner(
        app, handler_cancellation=cancels_handlers, access_log=None, shutdown_timeout=1
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def make_world(
    settings: Settings, *, cancels_handlers: bool = True, **options: Any
) -> AsyncIterator[World]:
    bus = Bus.connect(settings)
    app = create_app(settings, bus, **options)
    async with ScriptedEngine(bus, saying(ids_of("hello world"))) as engine:
        await engine.be_ready(folder_hash(Path(settings.model)))
        async with (
            serving(app, cancels_handlers=cancels_handlers) as url,
            aiohttp.ClientSession(timeout=PATIENCE) as http,
        ):
            await until(lambda: app[READINESS].problem is None)
            yield World(url, app, engine, http, bus, settings)
    await bus.close()


async def begin(world: World, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Send a request on a connection of its own, and read no answer."""
    host, port = world.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
    await writer.drain()
    return writer
