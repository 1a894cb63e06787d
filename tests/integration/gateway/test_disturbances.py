"""Whatever is killed behind a stream, its client gets each token once, and all of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.fakes.gateway_pool import Listener, Pool, gateways, make_pool, tokens_for
from tests.fakes.gateway_process import Start, until_served
from tests.fakes.gateway_world import until
from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.redis_proxy import RedisProxy
from tests.fakes.redis_server import RedisServer
from tests.fakes.scheduler_pool import eventually, scheduler
from wire.config import Settings, load

pytestmark = pytest.mark.redis

STEP_S = 0.004
RESUMABLE = {"X-Resumable": "1"}


@pytest.fixture
def settings(make_settings: Callable[..., Settings], oracle_folder: Path) -> Settings:
    return make_settings(model=str(oracle_folder), worker_timeout_s=0.6, leader_lease_s=0.6)


def body_for(seed: int, max_tokens: int = 120) -> dict[str, Any]:
    return {
        "prompt": [seed + 1] * (3 + seed),
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
    }


class Crowd:
    """Clients of every kind, and what each must have in the end."""

    def __init__(self, pool: Pool, num_clients: int = 6) -> None:
        self._pool = pool
        self.clients = [
            Listener(pool.http, body_for(seed), RESUMABLE if seed % 2 else {})
            for seed in range(num_clients)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._whole: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        """Let all of them ask; one more asks for a whole answer."""
        urls = self._pool.urls
        for number, client in enumerate(self.clients):
            listen = client.listen(urls[number % len(urls)])
            self._tasks.append(asyncio.ensure_future(listen))
        self._whole = asyncio.ensure_future(self._pool.post(body_for(99)))

    async def have(self, num_events: int) -> None:
        for client in self.clients:
            await client.has(num_events)

    async def are_kept_waiting(self) -> None:
        """Wait until each has been told more than once that its stream lives."""
        before = [client.num_kept_alive for client in self.clients]
        pairs = list(zip(self.clients, before, strict=True))
        await until(lambda: all(client.num_kept_alive >= count + 2 for client, count in pairs))

    async def check(self) -> None:
        """Wait for all, and compare each with what is undisturbed."""
        await asyncio.gather(*self._tasks)
        for seed, client in enumerate(self.clients):
            *chunks, done = client.chunks
            tokens = [i for c in chunks for i in c["choices"][0].get("token_ids", [])]
            assert done == "[DONE]"
            assert tokens == tokens_for(body_for(seed))
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert self._whole is not None
        status, body = await self._whole
        assert (status, body["choices"][0]["token_ids"]) == (200, tokens_for(body_for(99)))


async def undisturbed(pool: Pool, clients: list[Listener]) -> list[str]:
    """What the resumable ones get when nothing happens."""
    calm = [Listener(pool.http, c.body, RESUMABLE) for c in clients if c.headers]
    await asyncio.gather(*(client.listen(pool.urls[0]) for client in calm))
    return [client.said for client in calm]


async def test_scheduler_and_worker_are_killed_under_open_streams(settings: Settings) -> None:
    async with gateways(settings, settings) as pool:
        crowd = Crowd(pool)
        async with OracleWorker(settings, step_s=STEP_S).running():
            async with scheduler(settings, orderly=False):
                crowd.begin()
                await crowd.have(10)
            async with scheduler(settings, orderly=False):
                await crowd.have(40)
        async with scheduler(settings, orderly=False):  # without any worker
            await asyncio.sleep(0)
        async with scheduler(settings), OracleWorker(settings, step_s=STEP_S).running():
            await crowd.check()
            calm = await undisturbed(pool, crowd.clients)
        assert [client.said for client in crowd.clients if client.headers] == calm


async def test_a_redis_that_lost_everything_costs_no_stream_a_token(
    redis_server: RedisServer, oracle_folder: Path
) -> None:
    settings = load(redis_url=redis_server.url, model=str(oracle_folder))
    async with make_pool(settings, step_s=STEP_S) as pool:
        crowd = Crowd(pool)
        crowd.begin()
        await crowd.have(20)
        await asyncio.to_thread(redis_server.restart)  # without AOF
        await crowd.check()
        again = crowd.clients[1]  # what is known of its answer was brought back, too
        late = Listener(pool.http, again.body, blocks=again.blocks[:7])
        await late.listen_again(pool.urls[0])
        assert late.said == again.said


async def test_a_redis_that_went_away_leaves_streams_open_and_goes_on(
    redis_kind: str, oracle_folder: Path
) -> None:
    server = RedisServer(redis_kind, aof=True)
    settings = load(redis_url=server.url, model=str(oracle_folder))
    try:
        async with make_pool(settings, step_s=STEP_S) as pool:
            crowd = Crowd(pool)
            crowd.begin()
            await crowd.have(20)
            await asyncio.to_thread(server.kill)
            await crowd.are_kept_waiting()
            await asyncio.to_thread(server.start)
            await crowd.check()
    finally:
        server.close()


async def test_a_gateway_that_is_cut_off_goes_on_where_it_was(
    settings: Settings, redis_server: RedisServer
) -> None:
    async with RedisProxy(redis_server.socket) as proxy:
        far = settings.model_copy(update={"redis_url": proxy.url})
        async with (
            scheduler(settings),
            OracleWorker(settings, step_s=STEP_S).running(),
            gateways(far) as pool,
        ):
            crowd = Crowd(pool)
            crowd.begin()
            await crowd.have(10)
            proxy.cut_off()
            await crowd.are_kept_waiting()
            proxy.cut()
            proxy.heal()
            await crowd.check()


async def test_no_client_ever_gets_anything_of_anothers(
    settings: Settings, redis_server: RedisServer
) -> None:
    """Clients leave at any moment, while replies of Redis are late."""
    async with RedisProxy(redis_server.socket) as proxy:
        far = settings.model_copy(update={"redis_url": proxy.url})
        async with (
            scheduler(settings),
            OracleWorker(settings, num_blocks=512).running(),
            gateways(far) as pool,
        ):
            stay = [Listener(pool.http, body_for(seed, 40)) for seed in range(12)]
            leave = [Listener(pool.http, body_for(seed, 40)) for seed in range(20, 60)]
            staying = [asyncio.ensure_future(c.listen(pool.urls[0])) for c in stay]
            leaving = [asyncio.ensure_future(c.listen(pool.urls[0])) for c in leave]
            for number, task in enumerate(leaving):
                proxy.hold_replies()
                await asyncio.sleep(0.001 * (number % 7))
                task.cancel()
                proxy.release_replies()
                await asyncio.sleep(0)
            await asyncio.gather(*staying)
            for seed, client in enumerate(stay):
                chunks = client.chunks[:-1]
                tokens = [i for c in chunks for i in c["choices"][0].get("token_ids", [])]
                assert tokens == tokens_for(body_for(seed, 40))
                assert len({chunk["id"] for chunk in chunks}) == 1
            await asyncio.wait(leaving)

            async def nothing_is_left() -> bool:
                return (await pool.bus.queue_lengths([]))["requests"] == 0

            await eventually(nothing_is_left)
            stats = await pool.bus.stats()
            assert stats["free_blocks"] == stats["total_blocks"]


async def test_another_gateway_goes_on_when_one_is_killed(
    settings: Settings, start: Start, port: int
) -> None:
    async with (
        scheduler(settings),
        OracleWorker(settings, step_s=STEP_S).running(),
        gateways(settings) as pool,
    ):
        victim = await start(port, model=settings.model)
        await until_served(victim.url)
        bodies = [body_for(1, 600), {**body_for(2, 600), "echo": True}]
        clients = [
            Listener(pool.http, body, {"Idempotency-Key": "k" + str(i)})
            for i, body in enumerate(bodies)
        ]
        listening = [asyncio.ensure_future(client.listen(victim.url)) for client in clients]
        for client in clients:
            await client.has(30)
        os.kill(victim.process.pid, signal.SIGKILL)
        results = await asyncio.gather(*listening, return_exceptions=True)
        assert all(isinstance(result, aiohttp.ClientError) for result in results)
        await asyncio.gather(*(client.listen_again(pool.urls[0]) for client in clients))
        calm = [Listener(pool.http, body, RESUMABLE) for body in bodies]
        await asyncio.gather(*(client.listen(pool.urls[0]) for client in calm))
        assert [client.said for client in clients] == [client.said for client in calm]
        again = Listener(pool.http, bodies[0], clients[0].headers)
        await again.listen(pool.urls[0])
        assert again.blocks == clients[0].blocks
