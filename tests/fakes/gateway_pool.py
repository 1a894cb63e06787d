"""Gateways in front of a real scheduler and paged oracles: what a client gets is exact, and known.

Each part can be cut off and started again while clients are connected. A client keeps every event
as it came, so that two streams can be compared byte by byte.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from gateway.app import create_app
from gateway.app_keys import READINESS
from tests.fakes.gateway_world import PATIENCE_S, serving, until
from tests.fakes.oracle_worker import VOCAB, OracleWorker
from tests.fakes.paged_oracle import generate
from tests.fakes.scheduler_pool import scheduler
from wire.bus import Bus
from wire.config import Settings
from wire.messages import SamplingParams
from wire.traces import open_tracing

FACTS = {"vocab_size": VOCAB, "max_position_embeddings": 4096}
"""What a model folder must say, so that the gateway takes the oracle for its model."""

COMPLETIONS = "/v1/completions"

PATIENCE = aiohttp.ClientTimeout(total=3 * PATIENCE_S)


@asynccontextmanager
async def gateway(settings: Settings, name: str | None = None) -> AsyncIterator[str]:
    """Run a gateway while the block lasts; its address."""
    bus = Bus.connect(settings)
    tracing = open_tracing(settings, "gateway", name or "g")
    app = create_app(settings, bus, name, keep_alive_s=0.2, tracing=tracing)
    try:
        async with serving(app) as url:
            await until(lambda: app[READINESS].model is not None)
            yield url
    finally:
        await bus.close()
        if tracing is not None:
            await tracing.close()


@dataclass
class Pool:
    """Two gateways, and what stands behind them."""

    urls: list[str]
    http: aiohttp.ClientSession
    bus: Bus

    async def post(
        self, body: dict[str, Any], path: str = COMPLETIONS, at: int = 0, **headers: str
    ) -> tuple[int, Any]:
        """Ask for a whole answer."""
        url = self.urls[at] + path
        async with self.http.post(url, json=body, headers=_headers(headers)) as response:
            return response.status, await response.json()

    async def get(self, path: str, at: int = 0, **headers: str) -> tuple[int, Any]:
        async with self.http.get(self.urls[at] + path, headers=_headers(headers)) as response:
            return response.status, await response.json()

    async def has_ended(self, req_id: str) -> bool:
        """Whether a request has ended, as Redis knows."""
        return (await self.bus.request(req_id)).get("status") == "finished"

    async def num_requests(self) -> int:
        """Requests that anything is known of."""
        keys = await self.bus.read([("KEYS", self.bus.keys.request("*").replace("{", "\\{"))])
        return len(keys[0])


@asynccontextmanager
async def gateways(*settings: Settings) -> AsyncIterator[Pool]:
    """Run a gateway for each of these settings, and nothing behind them."""
    bus = Bus.connect(settings[0])
    async with AsyncExitStack() as stack:
        stack.push_async_callback(bus.close)
        urls = [
            await stack.enter_async_context(gateway(one, f"g{number}"))
            for number, one in enumerate(settings)
        ]
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=PATIENCE))
        yield Pool(urls, http, bus)


@asynccontextmanager
async def make_pool(
    settings: Settings, *, step_s: float = 0.0, **worker: int
) -> AsyncIterator[Pool]:
    """Run two gateways, a scheduler and a worker."""
    async with (
        scheduler(settings),
        OracleWorker(settings, step_s=step_s, **worker).running(),
        gateways(settings, settings) as pool,
    ):
        yield pool


@dataclass
class Listener:
    """A client of one stream, who may lose the connection and come back."""

    http: aiohttp.ClientSession
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    path: str = COMPLETIONS
    blocks: list[str] = field(default_factory=list)
    """Events as they came; comments left out."""
    status: int = 0
    num_kept_alive: int = 0
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def listen(self, url: str) -> None:
        """Post, and take events until the stream ends or the connection is lost."""
        body = {**self.body, "stream": True}
        async with self.http.post(url + self.path, json=body, headers=self.headers) as got:
            await self._take(got)

    async def listen_again(self, url: str) -> None:
        """Ask for the rest behind the last event."""
        headers = {**self.headers, "Last-Event-ID": self.last_id}
        async with self.http.get(f"{url}/v1/streams/{self.req_id}", headers=headers) as got:
            await self._take(got)

    async def has(self, num_events: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.news:
            await self.news.wait_for(lambda: len(self.blocks) >= num_events)

    @property
    def last_id(self) -> str:
        return id_of(self.blocks[-1])

    @property
    def req_id(self) -> str:
        return self.last_id.partition("/")[0]

    @property
    def said(self) -> str:
        """Everything, but for what differs between two requests."""
        return neutral("".join(self.blocks))

    @property
    def chunks(self) -> list[Any]:
        return [data_of(block) for block in self.blocks]

    async def _take(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        buffer = ""
        async for piece in response.content.iter_any():
            buffer += piece.decode()
            *blocks, buffer = buffer.split("\n\n")
            self.num_kept_alive += blocks.count("")
            self.blocks += [f"{block}\n\n" for block in blocks if block]
            async with self.news:
                self.news.notify_all()
        assert not buffer, "the stream ends within an event"


def neutral(text: str) -> str:
    """Replace what tells two equal requests apart: ids and the time."""
    return re.sub(r'"created":\d+', '"created":0', re.sub(r"[0-9a-f]{32}", "R", text))


def id_of(block: str) -> str:
    """The id of an event; empty if it has none."""
    lines = [line for line in block.split("\n") if line.startswith("id: ")]
    return lines[0].removeprefix("id: ") if lines else ""


def data_of(block: str) -> Any:
    data = block.rstrip("\n").rpartition("data: ")[2]
    return data if data == "[DONE]" else json.loads(data)


def tokens_for(body: dict[str, Any], choice: int = 0) -> list[int]:
    """What the oracle says to a completion of token ids with a seed."""
    sampling = SamplingParams(max_tokens=body["max_tokens"], seed=body["seed"] + choice)
    return generate(body["prompt"], sampling, VOCAB)


def _headers(names: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in names.items()}
