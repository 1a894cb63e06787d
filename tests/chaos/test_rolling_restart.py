"""A new version, and the old one again, while clients listen: every stream is what it would be."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.chaos.pool import ROOT, Pool
from tests.fakes.gateway_pool import FACTS, data_of, id_of, neutral
from tests.fakes.running_stack import free_port
from tests.fakes.tokenizers import byte_level_tokenizer, write_model_folder

pytestmark = [pytest.mark.chaos, pytest.mark.redis, pytest.mark.long]

NUM_STREAMS = 32
NEXT = ("-m", "tests.fakes.next_version")
WORKER = ("--step-ms", "40", "--num-blocks", "4000")
PATIENCE_S = 400


class Rolling:
    """A pool with real gateways, each part of which can become the other version."""

    def __init__(self, pool: Pool, folder: Path, first: tuple[str, ...]) -> None:
        self.pool = pool
        self.parts: list[tuple[Any, list[str]]] = []
        self.urls = []
        for number in range(2):
            name, port = f"w{number}", free_port()
            worker = pool.add_worker(*WORKER)
            self.parts.append((worker, ["tests.fakes.oracle_worker", name, *WORKER]))
            self.parts.append((pool.add_scheduler(), ["scheduler_svc"]))
            ours = {"PAGESTREAM_PORT": str(port), "PAGESTREAM_MODEL": str(folder)}
            self.parts.append((pool.add_gateway(environ=ours), ["gateway"]))
            self.urls.append(f"http://127.0.0.1:{port}")
        self.become(first)

    def become(self, launcher: tuple[str, ...]) -> None:
        for process, arguments in self.parts:
            process.become(*launcher, *arguments)

    async def ready(self) -> None:
        await self.pool.ready()
        async with aiohttp.ClientSession() as http, asyncio.timeout(PATIENCE_S):
            for url in self.urls:
                while not await has_its_model(http, url):
                    await asyncio.sleep(0.1)

    async def restart(self, *options: str) -> tuple[int, str]:
        redis_url = self.pool.redis.url
        ps = f"{sys.executable} -m pagestream ps --json --set REDIS_URL={redis_url}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, ROOT / "deploy" / "rolling-restart", "--ps", ps, *options),
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        return process.returncode or 0, said.decode()


async def has_its_model(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether a gateway takes requests: it cannot tell that the oracle is what it serves."""
    try:
        async with http.get(url + "/v1/models") as response:
            [card] = (await response.json())["data"]
    except aiohttp.ClientError:
        return False
    return card["max_model_len"] is not None


@asynccontextmanager
async def rolling(folder: Path, first: tuple[str, ...]) -> AsyncIterator[Rolling]:
    pool = Pool(drain_timeout_s=2)
    made = Rolling(pool, write_model_folder(folder, byte_level_tokenizer(), config=FACTS), first)
    try:
        async with pool.running():
            await made.ready()
            yield made
    finally:
        await pool.close()


async def listen(urls: list[str], body: dict[str, Any], draw: random.Random) -> str:
    """Take a stream to its end, over as many connections as that takes."""
    blocks: list[str] = []
    key = f"{draw.getrandbits(64):x}"
    async with aiohttp.ClientSession() as http:
        while not blocks or data_of(blocks[-1]) != "[DONE]":
            headers = {"Idempotency-Key": key}
            if blocks:
                headers["Last-Event-ID"] = id_of(blocks[-1])
            url, buffer = draw.choice(urls) + "/v1/completions", ""
            try:
                async with http.post(url, json=body, headers=headers) as response:
                    if response.status != 200:
                        assert response.status == 503, await response.text()
                        await asyncio.sleep(0.1)
                        continue
                    async for piece in response.content.iter_any():
                        *whole, buffer = (buffer + piece.decode()).split("\n\n")
                        blocks += [f"{one}\n\n" for one in whole if one]
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
    return neutral("".join(blocks))


def bodies() -> list[dict[str, Any]]:
    common = {"max_tokens": 250, "ignore_eos": True, "stream": True}
    return [{**common, "prompt": [n + 1] * (n + 5), "seed": n} for n in range(NUM_STREAMS)]


async def listen_until(
    is_over: asyncio.Event, urls: list[str], body: dict[str, Any], draw: random.Random
) -> list[str]:
    """Take one stream after the other; so each client has one open at any moment."""
    taken = [await listen(urls, body, draw)]
    while not is_over.is_set():
        taken.append(await listen(urls, body, draw))
    return taken


@pytest.mark.parametrize(
    ("first", "then", "options"),
    [(("-m",), NEXT, ()), (NEXT, ("-m",), ("--reverse",))],
    ids=["to the next version", "back to the old version"],
)
async def test_every_process_is_restarted_and_no_stream_is_changed(
    tmp_path: Path, first: tuple[str, ...], then: tuple[str, ...], options: tuple[str, ...]
) -> None:
    draws = [random.Random(number) for number in range(NUM_STREAMS)]
    async with rolling(tmp_path / "oracle", first) as made, asyncio.timeout(PATIENCE_S):
        asking = [listen(made.urls, *one) for one in zip(bodies(), draws, strict=True)]
        undisturbed = await asyncio.gather(*asking)
        pids = {process.pid for process in made.pool.processes}
        made.become(then)
        is_over = asyncio.Event()
        listening = [
            asyncio.ensure_future(listen_until(is_over, made.urls, *one))
            for one in zip(bodies(), draws, strict=True)
        ]
        code, said = await made.restart(*options)
        is_over.set()
        assert code == 0, said
        assert said.count("restarting") == len(pids) == 6
        assert not pids & {process.pid for process in made.pool.processes}
        for want, taken in zip(undisturbed, await asyncio.gather(*listening), strict=True):
            assert want.endswith("[DONE]\n\n")
            assert taken == [want] * len(taken)
        assert not made.pool.tracebacks()
