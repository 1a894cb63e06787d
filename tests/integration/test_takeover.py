"""A new leader takes over what the workers hold, and computes only what nobody has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from scheduler_svc.service import serve
from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.scheduler_pool import want
from tests.fakes.stream_client import StreamClient
from wire.bus import Bus
from wire.config import Settings

pytestmark = pytest.mark.redis

PATIENCE_S = 30
BLOCK = 16


class Reign:
    """A scheduler that can be cut off and followed by another."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._task = asyncio.ensure_future(serve(settings, asyncio.Event()))

    async def change(self) -> None:
        await self.end()
        self._task = asyncio.ensure_future(serve(self._settings, asyncio.Event()))

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def reign(settings: Settings) -> AsyncIterator[Reign]:
    one = Reign(settings)
    try:
        yield one
    finally:
        await one.end()


async def figure(bus: Bus, name: str) -> int:
    return int((await bus.stats()).get(name, 0))


async def until_followed(bus: Bus, epoch: int) -> None:
    while await figure(bus, "epoch") == epoch or not await figure(bus, "num_steps_total"):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
async def test_a_new_leader_computes_only_what_no_worker_holds(
    enable_prefix_caching: bool, make_settings: Callable[..., Settings], bus: Bus
) -> None:
    settings = make_settings(enable_prefix_caching=enable_prefix_caching)
    async with (
        reign(settings) as scheduler,
        OracleWorker(settings, "a", num_blocks=256, step_s=0.002).running(),
        OracleWorker(settings, "b", num_blocks=256, step_s=0.002).running(),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        streams = [await client.submit([n] * 200, 200, seed=n) for n in range(8)]
        for stream in streams:
            await stream.has_tokens(20)
        epoch = await figure(bus, "epoch")
        await scheduler.change()
        await until_followed(bus, epoch)
        for stream in streams:
            await stream.finished()
            assert stream.tokens == want(stream)
        num_taken_over = await figure(bus, "prefix_cache_hits_total")
        # What is computed anew of each is its last block, and what was never committed.
        num_known = sum(len(stream.prompt) + 20 for stream in streams)
        most = len(streams) * 2 * BLOCK
        if enable_prefix_caching:
            assert num_taken_over >= num_known - most
        else:
            assert num_taken_over == 0


async def test_nothing_is_computed_before_the_first_workers_have_answered(
    make_settings: Callable[..., Settings], bus: Bus
) -> None:
    """Or all would go to whoever answers first, away from their blocks."""
    settings = make_settings(worker_timeout_s=PATIENCE_S)
    async with (
        reign(settings) as scheduler,
        OracleWorker(settings, "a", num_blocks=256).running() as quick,
        OracleWorker(settings, "b", num_blocks=256).running() as slow,
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        streams = [await client.submit([n] * 50, 500, seed=n) for n in range(4)]
        for stream in streams:
            await stream.has_tokens(20)
        slow.may_answer.clear()
        await scheduler.change()
        fence = bus.keys.results(quick.process)

        async def has_answered() -> bool:
            (last,) = await bus.newest(fence, 1)
            return last.entry_id.endswith("-0")

        while not await has_answered():
            await asyncio.sleep(0.01)
        num_steps = quick.num_steps
        await asyncio.sleep(0.3)
        assert quick.num_steps == num_steps
        slow.may_answer.set()
        for stream in streams:
            await stream.finished()
            assert stream.tokens == want(stream)


async def test_a_worker_that_does_not_answer_holds_nobody_up_for_long(
    make_settings: Callable[..., Settings],
) -> None:
    settings = make_settings(worker_timeout_s=0.5, step_timeout_s=PATIENCE_S)
    async with (
        reign(settings) as scheduler,
        OracleWorker(settings, "a").running(),
        OracleWorker(settings, "b").running() as hung,
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        hung.may_answer.clear()  # its heart goes on
        await scheduler.change()
        stream = await client.submit([1, 2, 3], 20)
        await stream.finished()
        assert stream.tokens == want(stream)


async def test_a_worker_that_was_silent_comes_back_with_what_it_holds(
    make_settings: Callable[..., Settings], bus: Bus
) -> None:
    settings = make_settings(worker_timeout_s=0.5)
    async with (
        reign(settings),
        OracleWorker(settings, "a", num_blocks=256, step_s=0.002).running() as worker,
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        stream = await client.submit([1] * 300, 500)
        await stream.has_tokens(5)
        worker.silence()
        while await figure(bus, "total_blocks"):
            await asyncio.sleep(0.01)
        worker.speak()
        await stream.finished()
        assert stream.tokens == want(stream)
        assert await figure(bus, "tokens_recomputed_total") <= 2 * BLOCK
