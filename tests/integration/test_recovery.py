"""What Redis may forget, and what a leader may have in hand when somebody is lost: single faults.

Each of these was found by a storm (tests/chaos), or by thinking about one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from scheduler_svc import recovery, roster
from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.leader import Leader
from scheduler_svc.mirror import Mirror
from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.past_the_bus import command
from tests.fakes.redis_server import RedisServer
from tests.fakes.scheduler_pool import PATIENCE_S, eventually, scheduler, want
from tests.fakes.stream_client import Stream, StreamClient
from wire.bus import Bus, BusDownError, Commit
from wire.config import Settings, load
from wire.keys import Keys, entry_id
from wire.messages import (
    CommittedTokens,
    EngineCoreRequest,
    SamplingParams,
    SchedulerOutput,
    request_numbers,
    token_ids,
)

pytestmark = pytest.mark.redis

REQ = 1_800_000_000_000 << 21


def request(req_id: str = "r", *, output: list[int] | None = None) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=8)
    return EngineCoreRequest(
        req_id, "g.1", 1, token_ids([5]), sampling, output_token_ids=token_ids(output or [])
    )


# ---------------------------------------------------------------- what Redis forgets


async def test_a_step_that_redis_forgot_in_a_restart_is_not_waited_for(redis_kind: str) -> None:
    """What was written after the last commit may be gone with the crash."""
    server = RedisServer(redis_kind, aof=True)
    settings = load(redis_url=server.url, worker_timeout_s=20)
    try:
        async with (
            scheduler(settings),
            OracleWorker(settings).running() as worker,
            StreamClient(settings).running() as client,
            asyncio.timeout(PATIENCE_S),
        ):
            stream = await client.submit([1, 2, 3], 200)
            await stream.has_tokens(20)
            worker.may_run.clear()  # from here on steps are read and not answered
            key = client.bus.keys.steps(worker.process)

            async def is_waiting() -> bool:
                (last,) = await client.bus.newest(key, 1)
                return int(last.entry_id.split("-")[1]) > worker.num_steps

            await eventually(is_waiting)
            (last,) = await client.bus.newest(key, 1)
            await command(client.bus, "XDEL", key, last.entry_id)
            server.restart()
            worker.may_run.set()
            await stream.finished()
            assert stream.tokens == want(stream)
    finally:
        server.close()


async def test_the_clients_prefix_wins_over_a_longer_record(bus: Bus, settings: Settings) -> None:
    """A rolled-back Redis may hold other tokens than the client got: its own go on."""
    epoch, _ = await bus.lead("me", 60)
    await bus.resubmit(request(output=[1, 2]))
    await command(bus, "SET", bus.keys.tokens("r"), token_ids([1, 9, 9, 9]).tobytes())
    (one,) = (await recovery.recover(bus)).in_flight
    assert (one.request.output_token_ids.tolist(), one.num_saved) == ([1, 2], 0)
    saved = token_ids([1, 2, 3]).tobytes()
    tokens = CommittedTokens(request_numbers([one.req]), token_ids([3]), is_checkpoint=True)
    await bus.commit(epoch, 1, Commit(tokens, checkpoints=[("r", 0, saved)]), 60)
    assert await bus.tokens(["r"]) == [saved]


async def test_order_priorities_and_deadlines_survive_the_scheduler(
    make_settings: Callable[..., Settings],
) -> None:
    settings = make_settings(max_num_seqs=1, scheduling_policy="priority", leader_lease_s=0.5)
    order: list[str] = []

    async def note_end(name: str, stream: Stream) -> None:
        end = await stream.finished()
        order.append(name if end.error is None else f"{name}: {end.error_code}")

    async with StreamClient(settings).running() as client, asyncio.timeout(PATIENCE_S):
        async with scheduler(settings):
            streams = {
                "later": await client.submit([1] * 9, 3, priority=5),
                "last": await client.submit([2] * 9, 3, priority=5),
                "urgent": await client.submit([3] * 9, 3, priority=-5),
                "too late": await client.submit([4] * 9, 3, deadline_ms=1500),
            }

            async def all_wait() -> bool:
                return (await client.bus.queue_lengths([]))["waiting"] == len(streams)

            await eventually(all_wait)
        ends = [asyncio.ensure_future(note_end(*one)) for one in streams.items()]
        async with scheduler(settings):
            await streams["too late"].finished()
            async with OracleWorker(settings).running():
                await asyncio.gather(*ends)
    assert order == ["too late: unavailable", "urgent", "later", "last"]


async def test_a_record_that_was_lost_is_written_anew(redis_server: RedisServer) -> None:
    settings = load(redis_url=redis_server.url)
    async with (
        scheduler(settings),
        OracleWorker(settings).running(),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        stream = await client.submit([1, 2, 3], 200)
        await stream.has_tokens(20)
        redis_server.restart()  # without AOF: everything is gone
        await stream.finished()
        assert (await client.bus.request(stream.req_id))["entry"]


async def test_a_recovery_may_take_longer_than_the_lease(
    make_settings: Callable[..., Settings], bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two schedulers would take the lead from each other for ever."""
    settings = make_settings(leader_lease_s=0.5)
    recover = recovery.recover
    epochs: list[int] = []

    async def slowly(bus: Bus) -> recovery.Found:
        epochs.append(int((await bus.read([("GET", bus.keys.epoch())]))[0]))
        await asyncio.sleep(4 * settings.leader_lease_s)
        return await recover(bus)

    monkeypatch.setattr(recovery, "recover", slowly)
    async with (
        scheduler(settings),
        scheduler(settings),
        OracleWorker(settings).running(),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        stream = await client.submit([1, 2, 3], 20)
        await stream.finished()
        assert stream.tokens == want(stream)
        assert len(epochs) == 1  # when they stop, one may take the lead from the other


# ---------------------------------------------------------------- what the dead leave behind


async def test_streams_of_a_worker_that_died_while_nobody_led_fade(
    settings: Settings, bus: Bus
) -> None:
    keys = [bus.keys.steps("w.dead"), bus.keys.results("w.dead")]
    for key in keys:
        await command(bus, "XADD", key, "1-1", "body", "")
    async with scheduler(settings), OracleWorker(settings, "w").running() as worker:

        async def is_fading() -> bool:
            return all([await ttl(bus, key) > 0 for key in keys])

        await eventually(is_fading)
        assert await ttl(bus, bus.keys.steps(worker.process)) < 0


async def test_streams_of_an_incarnation_that_failed_fade(
    make_settings: Callable[..., Settings], bus: Bus
) -> None:
    settings = make_settings(worker_timeout_s=PATIENCE_S)
    async with (
        scheduler(settings),
        OracleWorker(settings).running() as worker,
        StreamClient(settings).running() as client,
    ):
        stream = await client.submit([1, 2, 3], 500)
        await stream.has_tokens(1)
        worker.silence()  # as an incarnation that is over
        worker.fail_next = "out of memory"
        key = bus.keys.steps(worker.process)

        async def is_fading() -> bool:
            return await ttl(bus, key) > 0

        await eventually(is_fading)
        await client.abort(stream)


async def ttl(bus: Bus, key: str) -> int:
    return int(await command(bus, "TTL", key))


async def test_a_worker_that_leaves_in_order_is_nobodys_fault(
    make_settings: Callable[..., Settings], bus: Bus
) -> None:
    settings = make_settings(max_worker_losses=2)
    async with (
        scheduler(settings),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        stream = await client.submit([1, 2, 3], 20)
        for _ in range(4):
            async with OracleWorker(settings, "w").running() as worker:
                worker.may_run.clear()  # so that it gets no further

                async def runs_here(process: str = worker.process) -> bool:
                    return (await bus.queue_lengths(["w"]))["running:w"] == 1

                await eventually(runs_here)
                await worker.leave(bus)
                worker.silence()

                async def is_gone() -> bool:
                    return (await bus.queue_lengths(["w"]))["running:w"] == 0

                await eventually(is_gone)
        async with OracleWorker(settings, "w").running():
            end = await stream.finished()
        assert end.finish_reason == "length"
        assert stream.tokens == want(stream)


# ---------------------------------------------------------------- inside a leader


async def test_a_cursor_that_is_taken_off_during_a_read_stays_off(bus: Bus) -> None:
    key = bus.keys.steps("w.1")
    reader = bus.reader({key: "0-0"})
    reading = asyncio.ensure_future(reader.read(5000))
    await asyncio.sleep(0)
    del reader.cursors[key]
    while not reading.done():
        await command(bus, "XADD", key, "*", "body", "")
    assert await reading
    assert reader.cursors == {}
    await reader.close()


async def test_a_worker_may_be_lost_while_another_gets_its_step(
    bus: Bus, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = Leader(bus, settings, "me", 1, 0)
    core = leader._scheduler
    await leader._roster.look()
    for process in ("a.1", "b.1"):
        core.add_worker(process, WorkerCapacity(num_blocks=8, block_size=16, max_model_len=64))
        core.add_request(REQ + len(core.requests), request(process), 0.0)

    async def publish(process: str, step: SchedulerOutput) -> None:
        for other in [one for one in core.lanes if one != process]:
            core.remove_worker(other)

    monkeypatch.setattr(leader, "_publish", publish)
    await leader._dispatch()
    assert len(core.lanes) == 1
    await leader.close()


async def test_a_leader_that_did_not_look_for_a_while_blames_nobody(
    bus: Bus, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was frozen, or Redis was: only what stays silent after that is lost."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(roster, "time", SimpleNamespace(monotonic=lambda: clock.now))
    epoch, now_ms = await bus.lead("me", lease_s=60)
    leader = Leader(bus, settings, "me", epoch, now_ms)
    capacity = {"num_blocks": 8, "block_size": 16, "max_model_len": 64}
    await bus.beat("worker", "w", "1", {"state": "ready", "beats": 1, **capacity}, 60)
    workers = []
    for seconds in (0.0, 30.0, 0.6, 0.6, 0.6):
        clock.now += seconds
        await leader._roster.look()
        workers.append(len(leader._roster.links))
    assert workers == [1, 1, 1, 1, 0]
    await leader.close()


async def test_while_redis_takes_no_writes_nobodys_silence_counts(
    settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a fail-over, until a replica follows: what can still be read grows old."""
    monkeypatch.setattr("scheduler_svc.gateways.SILENCE_S", 1.5)
    async with (
        scheduler(settings),
        OracleWorker(settings, step_s=0.005).running(),
        StreamClient(settings).running() as client,
        asyncio.timeout(PATIENCE_S),
    ):
        streams = [await client.submit([n] * 20, 200) for n in range(3)]
        await streams[0].has_tokens(5)
        epoch = (await bus.stats())["epoch"]
        await command(bus, "CONFIG", "SET", "min-replicas-to-write", 1)
        await asyncio.sleep(7)  # heartbeats have vanished, and with them all that is heard
        await command(bus, "CONFIG", "SET", "min-replicas-to-write", 0)
        for stream in streams:
            end = await stream.finished()
            assert stream.tokens == want(stream)
            assert end.num_preemptions == 0
        assert (await bus.stats())["epoch"] == epoch


class UnreliableBus:
    """Loses the first write."""

    def __init__(self) -> None:
        self.keys = Keys("p")
        self.commands: list[tuple[Any, ...]] = []
        self.is_down = True

    async def write_as_leader(self, _: int, commands: list[tuple[Any, ...]]) -> None:
        if self.is_down:
            raise BusDownError("away")
        self.commands += commands


async def test_a_mirror_that_could_not_be_written_is_written_anew() -> None:
    bus = UnreliableBus()
    mirror = Mirror(cast("Bus", bus), 1)
    core = Scheduler(SchedulerConfig())
    core.add_request(REQ, request("r"), 0.0)
    with pytest.raises(BusDownError):
        await mirror.write(core, {})
    bus.is_down = False
    await mirror.write(core, {})
    names = [command[0] for command in bus.commands]
    assert names[:2] == ["DEL", "ZADD"]
    assert bus.commands[1][-1] == "r"
    assert entry_id(REQ)
