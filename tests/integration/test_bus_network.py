"""What the bus promises when the network is bad: lost replies, cuts, and callers that leave."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.fakes.past_the_bus import command
from tests.fakes.redis_proxy import RedisProxy
from tests.fakes.redis_server import RedisServer
from tests.fakes.samples import new_commit, new_request, new_result
from tests.fakes.streams import drain, entries
from wire.bus import Bus, BusDownError, FencedError, retrying
from wire.config import load
from wire.connection import Connection
from wire.messages import AbortRequest, SchedulerOutput

pytestmark = [pytest.mark.redis, pytest.mark.every_redis]

BusCall = Callable[[Bus, int], Awaitable[object]]


@pytest.fixture
async def proxy(redis_server: RedisServer) -> AsyncIterator[RedisProxy]:
    async with RedisProxy(redis_server.socket) as proxy:
        yield proxy


@pytest.fixture
async def far_bus(proxy: RedisProxy) -> AsyncIterator[Bus]:
    """A bus behind the bad network."""
    bus = Bus.connect(load(redis_url=proxy.url))
    yield bus
    await bus.close()


# ---------------------------------------------------------------- replies get lost


REPEATABLE: dict[str, BusCall] = {
    "submit": lambda bus, epoch: bus.submit([new_request("r"), new_request("s")], 2, 60),
    "commit": lambda bus, epoch: bus.commit(epoch, 1, new_commit((1, 10)), 60),
    "publish_step": lambda bus, epoch: bus.publish_step("w.1", SchedulerOutput(epoch, 1)),
    "publish_result": lambda bus, epoch: bus.publish_result("w.1", new_result(epoch, 1, 42)),
    "beat": lambda bus, epoch: bus.beat("worker", "w", "1", {"state": "ready"}, 60),
    "renew": lambda bus, epoch: bus.lead("a", 60, held_epoch=epoch),
}


@pytest.mark.parametrize("name", REPEATABLE)
async def test_a_call_whose_reply_was_lost_can_be_repeated(
    far_bus: Bus, bus: Bus, proxy: RedisProxy, redis: Connection, name: str
):
    call = REPEATABLE[name]
    epoch, _ = await bus.lead("a", lease_s=60)
    await call(bus, epoch)
    expected = await _contents(redis)
    await redis.command("FLUSHALL")
    await redis.command("SET", bus.keys.epoch(), epoch)
    await redis.command("SET", bus.keys.leader(), "a")

    await far_bus.stats()  # connects
    proxy.lose_replies(3)
    for _ in range(3):
        with pytest.raises(BusDownError):
            await call(far_bus, epoch)
    await call(far_bus, epoch)
    assert await _contents(redis) == expected


async def test_steps_behind_each_other_can_all_be_repeated(far_bus: Bus, proxy: RedisProxy):
    steps = [SchedulerOutput(5, n) for n in range(4)]
    await far_bus.publish_step("w.1", steps[0])
    proxy.lose_replies(3)
    for step in steps[1:]:
        with pytest.raises(BusDownError):
            await far_bus.publish_step("w.1", step)
    for step in steps:
        await far_bus.publish_step("w.1", step)
    found = await entries(far_bus, far_bus.keys.steps("w.1"))
    assert [entry.entry_id for entry in found] == ["5-0", "5-1", "5-2", "5-3"]


async def test_a_commit_in_doubt_is_fenced_once_another_leads(
    far_bus: Bus, bus: Bus, proxy: RedisProxy
):
    epoch, _ = await bus.lead("a", lease_s=60)
    await far_bus.commit(epoch, 1, new_commit((1, 10)), retention_s=60)
    proxy.lose_replies()
    with pytest.raises(BusDownError):
        await far_bus.commit(epoch, 2, new_commit((1, 11)), retention_s=60)
    await bus.lead("a", lease_s=60)
    with pytest.raises(FencedError):
        await far_bus.commit(epoch, 2, new_commit((1, 11)), retention_s=60)
    assert len(await entries(bus, bus.keys.log())) == 2


async def test_a_repeated_abort_is_harmless(far_bus: Bus, bus: Bus, proxy: RedisProxy):
    await bus.submit([new_request("r")], limit=1, retention_s=60)
    before = await bus.request("r")
    await far_bus.stats()
    proxy.lose_replies()
    with pytest.raises(BusDownError):
        await far_bus.abort(AbortRequest("r"))
    await far_bus.abort(AbortRequest("r"))
    assert await bus.request("r") == before


async def test_a_reader_loses_nothing_over_cut_connections(
    far_bus: Bus, bus: Bus, proxy: RedisProxy
):
    reader = far_bus.reader({bus.keys.results("w.1"): "0-0"})
    seen: list[str] = []
    for n in range(60):
        await bus.publish_result("w.1", new_result(5, n, n))
        match n % 3:
            case 0:
                proxy.lose_replies()
            case 1:
                proxy.cut()
        found = await _outcome(reader.read(block_ms=0))
        if isinstance(found, list):
            seen += [entry.entry_id for entry in found]
    seen += await drain(reader)
    await reader.close()
    assert seen == [f"5-{n}" for n in range(60)]


async def test_retrying_goes_on_until_the_network_heals(far_bus: Bus, proxy: RedisProxy):
    await far_bus.stats()
    proxy.lose_replies(4)
    assert await retrying(far_bus.stats, max_pause_s=0.01) == {}


# ---------------------------------------------------------------- callers go away


async def test_a_cancelled_call_never_hands_its_reply_to_another(
    far_bus: Bus, bus: Bus, proxy: RedisProxy, redis: Connection
):
    for n in range(50):
        await redis.command("HSET", bus.keys.request(f"r{n}"), "number", n)
    rng = random.Random(7)
    for _ in range(20):
        proxy.hold_replies()
        sent = proxy.num_sent
        tasks = [asyncio.ensure_future(far_bus.request(f"r{n}")) for n in range(50)]
        await proxy.wait_sent(sent + 1)
        for task in rng.sample(tasks, 25):
            task.cancel()
        proxy.release_replies()
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        for n, reply in enumerate(replies):
            if not isinstance(reply, asyncio.CancelledError):
                assert reply == {"number": str(n)}
        assert sum(isinstance(reply, dict) for reply in replies) == 25


async def test_a_cancelled_submission_entered_whole_or_not_at_all(
    far_bus: Bus, bus: Bus, proxy: RedisProxy
):
    await far_bus.submit([new_request()], limit=1000, retention_s=60)
    for n in range(20):
        proxy.hold_replies()
        sent = proxy.num_sent
        pair = [new_request(f"{n}a"), new_request(f"{n}b")]
        task = asyncio.ensure_future(far_bus.submit(pair, limit=1000, retention_s=60))
        await proxy.wait_sent(sent + 1)
        task.cancel()
        proxy.release_replies()
        await asyncio.gather(task, return_exceptions=True)
        await far_bus.submit(pair, limit=1000, retention_s=60)
    added = [entry.fields["id"].decode() for entry in await entries(bus, bus.keys.requests())]
    assert added[1:] == [f"{n}{half}" for n in range(20) for half in "ab"]


async def _outcome(call: Awaitable[object]) -> object:
    try:
        return await call
    except Exception as error:
        return error


async def _contents(redis: Connection) -> dict[bytes, object]:
    """All that is in streams and hashes; the ids that the server gave are replaced by a rank."""
    found: dict[bytes, object] = {}
    for key in sorted(await redis.command("KEYS", "*")):
        kind = await redis.command("TYPE", key)
        if kind == b"stream":
            read = await redis.command("XRANGE", key, "-", "+")
            found[key] = [sorted(fields.items()) for _, fields in read]
        elif kind == b"hash":
            fields = await redis.command("HGETALL", key)
            found[key] = {name: value for name, value in fields.items() if name != b"entry"}
        else:
            found[key] = await redis.command("GET", key)
    return found


async def test_the_proxy_does_have_commands_arrive_twice(
    far_bus: Bus, proxy: RedisProxy, redis: Connection
) -> None:
    proxy.doubles = True
    await command(far_bus, "INCR", "twice")
    assert int(await redis.command("GET", "twice")) == 2
