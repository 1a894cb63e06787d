"""A scheduler, a worker, a gateway or Redis is lost, one at a time, and no token with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from scheduler_svc import gateways
from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.redis_server import RedisServer
from tests.fakes.scheduler_pool import PATIENCE_S, eventually, pool, scheduler, want
from tests.fakes.stream_client import StreamClient
from wire.bus import Bus
from wire.config import Settings, load

pytestmark = pytest.mark.redis


async def test_a_restarted_scheduler_goes_on_where_the_last_one_stopped(
    settings: Settings, bus: Bus
) -> None:
    async with (
        OracleWorker(settings).running(),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        streams = []
        for round_ in range(5):
            async with scheduler(settings, orderly=round_ % 2 == 0):
                streams += [await client.submit([round_, i], 300) for i in range(4)]
                await streams[-1].has_tokens(20)
        async with scheduler(settings):
            for stream in streams:
                await stream.finished()
                assert stream.tokens == want(stream)
        assert int((await bus.stats())["requests_recovered_total"]) > 0


async def test_a_standby_takes_over(settings: Settings) -> None:
    async with (
        scheduler(settings),
        OracleWorker(settings).running(),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        async with scheduler(settings, orderly=False):
            stream = await client.submit([1, 2, 3], 400)
            await stream.has_tokens(5)
        await stream.finished()
        assert stream.tokens == want(stream)


async def test_a_lost_worker_is_replaced_and_no_token_differs(settings: Settings) -> None:
    async with (
        scheduler(settings),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        async with OracleWorker(settings, "w").running():
            streams = [await client.submit([i] * 9, 300, seed=i) for i in range(6)]
            await streams[-1].has_tokens(10)
        async with OracleWorker(settings, "w").running():
            for stream in streams:
                await stream.finished()
                assert stream.tokens == want(stream)


async def test_a_worker_that_fell_silent_is_given_up_and_taken_back(
    make_settings: Callable[..., Settings], bus: Bus
) -> None:
    settings = make_settings(worker_timeout_s=0.5)
    async with (
        scheduler(settings),
        OracleWorker(settings).running() as worker,
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        stream = await client.submit([4, 5], 600)
        await stream.has_tokens(10)
        worker.may_run.clear()
        worker.silence()

        async def is_given_up() -> bool:
            return (await bus.queue_lengths(["w"]))["running:w"] == 0

        await eventually(is_given_up)
        worker.speak()
        worker.may_run.set()
        await stream.finished()
        assert stream.tokens == want(stream)


async def test_a_failed_step_costs_the_incarnation_and_no_token(settings: Settings) -> None:
    async with (
        scheduler(settings),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        async with OracleWorker(settings, "w").running() as worker:
            stream = await client.submit([4, 5], 100)
            await stream.has_tokens(10)
            worker.fail_next = "out of memory"
            worker.may_run.clear()
        async with OracleWorker(settings, "w").running():
            await stream.finished()
            assert stream.tokens == want(stream)


async def test_a_redis_that_restarts_with_its_data_loses_nothing(
    redis_kind: str,
) -> None:
    server = RedisServer(redis_kind, aof=True)
    settings = load(redis_url=server.url)
    try:
        async with pool(settings) as client, asyncio.timeout(PATIENCE_S):
            streams = [await client.submit([i] * 5, 500) for i in range(6)]
            for count in (5, 150, 300):
                await streams[0].has_tokens(count)
                server.restart()
            for stream in streams:
                await stream.finished()
                assert stream.tokens == want(stream)
    finally:
        server.close()


async def test_another_gateway_continues_a_stream(settings: Settings) -> None:
    async with (
        scheduler(settings),
        OracleWorker(settings).running(),
        StreamClient(settings, "other").running() as other,
        asyncio.timeout(PATIENCE_S),
    ):
        async with StreamClient(settings, "first").running() as first:
            stream = await first.submit([1, 2, 3], 600, is_resumable=True)
            await stream.has_tokens(50)
        copy = await other.adopt(stream)
        await copy.finished()
        assert copy.tokens == want(copy)


async def test_what_nobody_follows_is_ended_and_what_may_come_back_is_not(
    settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "SILENCE_S", 0.2)
    short_lived = settings.model_copy(update={"worker_timeout_s": 0.3})
    async with (
        scheduler(settings),
        OracleWorker(settings).running() as worker,
        asyncio.timeout(PATIENCE_S),
    ):
        async with StreamClient(short_lived).running() as client:
            plain = await client.submit([1, 2, 3], 3000)
            resumable = await client.submit([1, 2, 3], 3000, is_resumable=True)
            await plain.has_tokens(5)
            await resumable.has_tokens(5)
            worker.may_run.clear()

        async def is_ended() -> bool:
            return (await bus.request(plain.req_id))["status"] == "finished"

        await eventually(is_ended)
        assert (await bus.request(resumable.req_id))["status"] == "running"
        worker.may_run.set()


async def test_a_redis_that_lost_everything_loses_no_request(redis_server: RedisServer) -> None:
    settings = load(redis_url=redis_server.url)
    async with pool(settings) as client, asyncio.timeout(PATIENCE_S):
        streams = [await client.submit([i] * 5, 600, seed=i) for i in range(6)]
        await streams[0].has_tokens(100)
        redis_server.restart()  # without AOF: everything is gone
        for stream in streams:
            await stream.finished()
            assert stream.tokens == want(stream)
        assert any(stream.num_resumes for stream in streams)


async def test_tenants_counters_survive_the_scheduler(settings: Settings, bus: Bus) -> None:
    async with (
        OracleWorker(settings).running(),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        async with scheduler(settings):
            stream = await client.submit([1] * 30, 20, tenant="a")
            await stream.finished()
        before = await bus.tenants()
        assert before["a"] >= 49
        async with scheduler(settings):
            stream = await client.submit([2] * 30, 20, tenant="a")
            await stream.finished()
        assert (await bus.tenants())["a"] >= before["a"] + 49
