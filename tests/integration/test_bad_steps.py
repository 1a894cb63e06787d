"""A request that goes wrong in its step, by what it computes or by what it needs, ends alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.scheduler_pool import scheduler, want
from tests.fakes.stream_client import StreamClient
from wire.bus import Bus
from wire.config import Settings

pytestmark = pytest.mark.redis

PATIENCE_S = 60
GUILTY = 990


@asynccontextmanager
async def pool(settings: Settings) -> AsyncIterator[StreamClient]:
    """A worker on which every request that begins with GUILTY goes wrong, if it computes that."""
    async with (
        scheduler(settings),
        OracleWorker(settings, step_s=0.005).running() as worker,
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        worker.goes_wrong_from = GUILTY
        yield client


async def is_empty(bus: Bus) -> bool:
    stats = await bus.stats()
    return stats["free_blocks"] == stats["total_blocks"]


async def test_a_request_that_goes_wrong_ends_alone(settings: Settings, bus: Bus) -> None:
    async with pool(settings) as client:
        neighbours = [await client.submit([n] * 20, 100, seed=n) for n in range(3)]
        await neighbours[0].has_tokens(10)
        guilty = await client.submit([GUILTY, 1, 2], 100)
        end = await guilty.finished()
        assert (end.finish_reason, end.error_code, guilty.tokens) == ("error", "internal", [])
        for stream in neighbours:
            await stream.finished()
            assert stream.tokens == want(stream)
        again = await client.submit([GUILTY, 1, 2], 100)
        assert (await again.finished()).finish_reason == "error"
        while not await is_empty(bus):
            await asyncio.sleep(0.02)
