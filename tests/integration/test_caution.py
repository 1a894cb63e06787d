"""A request that the scheduler itself cannot bear: it is set aside, all others are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service import serve
from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.scheduler_pool import want
from tests.fakes.stream_client import StreamClient
from wire.bus import Bus
from wire.config import Settings
from wire.messages import (
    AbortRequest,
    EngineCoreRequest,
    SamplingParams,
    SchedulerOutput,
    token_ids,
)

pytestmark = pytest.mark.redis

PATIENCE_S = 30
POISON = 996


class Death(BaseException):
    """Ends a scheduler as a kill would: nothing it may do about it."""


@pytest.fixture
def core_that(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the core raise this, on taking a poisonous request on or on making a step beside it."""

    def install(where: str, error: type[BaseException]) -> list[int]:
        raised: list[int] = []
        add_request, schedule = Scheduler.add_request, Scheduler.schedule

        def die(num: int) -> None:
            raised.append(num)
            raise error("poison")

        def add(self: Scheduler, num: int, request: EngineCoreRequest, arrival: float) -> None:
            if request.prompt_token_ids[0] == POISON:
                die(num)
            add_request(self, num, request, arrival)

        def plan(self: Scheduler, worker: str, now: float) -> SchedulerOutput | None:
            for num, request in self.requests.items():
                if request.prompt_token_ids[0] == POISON:
                    die(num)
            return schedule(self, worker, now)

        name, function = {"add": ("add_request", add), "plan": ("schedule", plan)}[where]
        monkeypatch.setattr(Scheduler, name, function)
        return raised

    return install


@asynccontextmanager
async def supervised(settings: Settings) -> AsyncIterator[None]:
    """Run the scheduler, and start it again when it dies, as `up` does."""
    stopping = asyncio.Event()

    async def live() -> None:
        while not stopping.is_set():
            try:
                await serve(settings, stopping)
            except BaseExceptionGroup as group:
                if group.split(Death)[1] is not None:
                    raise
            except Death:
                continue

    task = asyncio.ensure_future(live())
    try:
        yield
    finally:
        stopping.set()
        await asyncio.wait([task])
        task.result()


async def until_survived(bus: Bus) -> None:
    """Wait until the leader's start has got through."""
    while not await bus.stats() or await bus.read([("EXISTS", bus.keys.starts())]) != [0]:
        await asyncio.sleep(0.02)


async def reasons(bus: Bus) -> list[str]:
    return [one.fields["reason"].decode() for one in await bus.newest(bus.keys.dead(), 10)]


@pytest.mark.parametrize(
    ("where", "error", "num_deaths"),
    [("add", ValueError, 1), ("add", Death, 5), ("plan", Death, 5)],
)
async def test_a_request_that_the_scheduler_dies_on_is_set_aside(
    where: str, error: type[BaseException], num_deaths: int, core_that: Any, settings: Settings
) -> None:
    """Caught, one failure is enough. Else: on arrival, at two starts, at two careful ones."""
    raised = core_that(where, error)
    async with (
        supervised(settings),
        OracleWorker(settings, step_s=0.005).running(),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        neighbours = [await client.submit([n] * 20, 300) for n in range(3)]
        bus = client.bus
        await until_survived(bus)
        poison = await client.submit([POISON, 1])
        late = await client.submit([5] * 20, 20)
        end = await poison.finished()
        assert (end.finish_reason, end.num_output_tokens) == ("error", 0)
        for stream in [*neighbours, late]:
            await stream.finished()
            assert stream.tokens == want(stream)
        assert len(raised) == num_deaths
        (reason,) = await reasons(bus)
        assert "died on this request" in reason
        record = await bus.request(poison.req_id)
        assert (record["status"], record["error_code"]) == ("finished", "internal")
        assert (await bus.queue_lengths([]))["requests"] == 0


async def test_a_wish_that_the_scheduler_dies_on_is_set_aside(
    settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def abort(*_: object) -> None:
        raise ValueError("poison")

    monkeypatch.setattr(Scheduler, "abort_request", abort)
    async with (
        supervised(settings),
        OracleWorker(settings, step_s=0.005).running(),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        stream = await client.submit([1] * 20, 60)
        await stream.has_tokens(3)
        await client.abort(stream)
        assert (await stream.finished()).finish_reason == "length"
        assert stream.tokens == want(stream)
        assert len(await reasons(bus)) == 1


async def three_starts(bus: Bus) -> int:
    """Let as many leaders have died early; the epoch of the last one."""
    epoch, _ = await bus.lead("before", lease_s=60)
    for _ in range(3):
        await bus.note_start(epoch)
    await bus.release_lead("before")
    return epoch


async def test_one_death_at_a_careful_start_condemns_nobody(settings: Settings, bus: Bus) -> None:
    """It may have been a kill, which is nobody's fault."""
    request = EngineCoreRequest("r", "g.1", 1, token_ids([1]), SamplingParams(max_tokens=4))
    await bus.submit([request], 10, 60)
    entry = (await bus.request("r"))["entry"]
    epoch = await three_starts(bus)
    await bus.suspect(epoch, entry, 1)
    async with supervised(settings), OracleWorker(settings).running():
        async with asyncio.timeout(PATIENCE_S):
            while (await bus.request("r"))["status"] != "finished":
                await asyncio.sleep(0.01)
            assert (await bus.request("r"))["finish_reason"] == "length"
            await until_survived(bus)
    assert await reasons(bus) == []


async def test_wishes_wait_until_a_careful_start_has_taken_all_in(
    settings: Settings, bus: Bus
) -> None:
    """An abort that was read before its request would be forgotten."""
    request = EngineCoreRequest("r", "g.1", 1, token_ids([1]), SamplingParams(max_tokens=4000))
    await bus.submit([request], 10, 60)
    await three_starts(bus)
    async with supervised(settings), asyncio.timeout(PATIENCE_S):
        await bus.abort(AbortRequest("r"))
        while (await bus.request("r")).get("finish_reason") != "abort":
            await asyncio.sleep(0.01)
