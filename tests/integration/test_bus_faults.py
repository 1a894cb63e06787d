"""What the bus promises when Redis dies, hangs, forgets, is full or holds what is not ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from tests.fakes.redis_server import RedisServer
from tests.fakes.samples import new_commit, new_request, new_result
from tests.fakes.streams import drain, entries
from wire import codec
from wire.bus import Bus, BusDownError, BusFullError, retrying
from wire.config import load
from wire.connection import Connection
from wire.messages import AbortRequest, EngineCoreOutputs, SchedulerOutput

pytestmark = [pytest.mark.redis, pytest.mark.every_redis]


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test need not wait as long as a service would. Before `bus`."""
    monkeypatch.setattr("wire.connection.COMMAND_TIMEOUT_S", 0.25)


# ---------------------------------------------------------------- Redis goes and comes


async def test_without_a_server_every_call_says_so_and_works_once_it_is_back(
    bus: Bus, redis_server: RedisServer
):
    reader = bus.reader({bus.keys.results("w.1"): "0-0"})
    await bus.publish_result("w.1", new_result(5, 1))
    assert await reader.read(block_ms=0)
    redis_server.kill()
    for call in (
        lambda: bus.submit([new_request()], limit=1, retention_s=60),
        lambda: bus.commit(5, 1, new_commit(), retention_s=60),
        lambda: bus.publish_step("w.1", SchedulerOutput(5, 1)),
        lambda: bus.beat("worker", "w", "1", {}, ttl_s=60),
        lambda: bus.processes("worker"),
        lambda: bus.leave("worker", "w"),
        lambda: bus.write_as_leader(5, []),
        lambda: reader.read(block_ms=1),
        bus.check_server,
        bus.stats,
    ):
        with pytest.raises(BusDownError):
            await call()
    redis_server.start()
    assert await bus.check_server() is None
    await bus.publish_result("w.1", new_result(5, 2))  # Redis has forgotten the scripts, too
    assert [entry.entry_id for entry in await reader.read(block_ms=0)] == ["5-2"]
    await reader.close()


async def test_a_frozen_server_is_noticed_and_the_write_may_still_come(
    short_timeout: None, bus: Bus, redis_server: RedisServer
):
    await retrying(lambda: bus.publish_result("w.1", new_result(5, 1)))
    redis_server.freeze()
    with pytest.raises(BusDownError):
        await bus.publish_result("w.1", new_result(5, 2))
    redis_server.thaw()
    await retrying(lambda: bus.publish_result("w.1", new_result(5, 2)))
    found = await entries(bus, bus.keys.results("w.1"))
    assert [entry.entry_id for entry in found] == ["5-1", "5-2"]


async def test_a_reader_of_a_frozen_server_notices_and_goes_on(
    short_timeout: None, bus: Bus, redis_server: RedisServer
):
    reader = bus.reader({bus.keys.results("w.1"): "0-0"}, max_block_ms=10)
    await retrying(lambda: reader.read(block_ms=0))
    redis_server.freeze()
    with pytest.raises(BusDownError):
        await reader.read(block_ms=10)
    redis_server.thaw()
    await retrying(lambda: bus.publish_result("w.1", new_result(5, 1)))
    assert await drain(reader) == ["5-1"]
    await reader.close()


async def test_a_reader_may_wait_longer_than_a_command(short_timeout: None, bus: Bus):
    reader = bus.reader({bus.keys.results("w.1"): "0-0"}, max_block_ms=400)
    assert await reader.read(block_ms=400) == []
    await reader.close()


async def test_a_reader_stops_waiting_when_the_server_dies(
    bus: Bus, redis: Connection, redis_server: RedisServer
):
    reader = bus.reader({bus.keys.results("w.1"): "0-0"}, max_block_ms=60_000)
    await reader.read(block_ms=0)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(_outcome(reader.read(block_ms=60_000)))
        await _somebody_blocks(redis)
        redis_server.kill()
    assert isinstance(reading.result(), BusDownError)
    await reader.close()


async def test_callers_beyond_the_connections_do_not_wait_for_ever(
    short_timeout: None, bus: Bus, redis_server: RedisServer
):
    redis_server.freeze()
    outcomes = await asyncio.gather(*(_outcome(bus.stats()) for _ in range(200)))
    redis_server.thaw()
    assert {type(outcome) for outcome in outcomes} == {BusDownError}
    assert any("too many commands wait" in str(outcome) for outcome in outcomes)
    assert await retrying(bus.stats) == {}


async def test_what_was_committed_survives_a_kill_with_aof(redis_kind: str):
    server = RedisServer(redis_kind, aof=True)
    bus = Bus.connect(load(redis_url=server.url))
    epoch, _ = await bus.lead("a", lease_s=60)
    request = new_request()
    await bus.submit([request], limit=1, retention_s=60)
    for n in range(1, 101):
        await bus.commit(epoch, n, new_commit((1, n)), retention_s=60)
    server.restart()
    found = await retrying(lambda: entries(bus, bus.keys.log()))
    assert [entry.entry_id for entry in found] == [f"{epoch}-{n}" for n in range(1, 101)]
    assert len(await entries(bus, bus.keys.requests())) == 1
    assert (await bus.lead("a", lease_s=60, held_epoch=epoch))[0] == epoch
    await bus.commit(epoch, 100, new_commit((1, 100)), retention_s=60)
    await bus.commit(epoch, 101, new_commit((1, 101)), retention_s=60)
    await bus.close()
    server.close()


async def test_a_server_that_became_a_replica_is_down_not_broken(bus: Bus, redis: Connection):
    await bus.publish_result("w.1", new_result(5, 1))
    await redis.command("REPLICAOF", "127.0.0.1", 1)
    with pytest.raises(BusDownError):
        await bus.publish_result("w.1", new_result(5, 2))
    with pytest.raises(BusDownError):
        await bus.submit([new_request()], limit=1, retention_s=60)
    await redis.command("REPLICAOF", "NO", "ONE")
    await bus.publish_result("w.1", new_result(5, 2))


async def test_a_server_busy_with_a_script_is_down_not_broken(bus: Bus, redis: Connection):
    await bus.submit([new_request()], limit=1, retention_s=60)
    await redis.command("CONFIG SET", "busy-reply-threshold", 1)
    async with asyncio.TaskGroup() as group:
        looping = group.create_task(_outcome(redis.command("EVAL", "while true do end", 0)))
        with pytest.raises(BusDownError):
            while True:
                await bus.stats()
        await redis.command("SCRIPT", "KILL")
    assert isinstance(looping.result(), Exception)
    await bus.stats()


async def test_scripts_that_the_server_forgot_are_sent_again(bus: Bus, redis: Connection):
    epoch, _ = await bus.lead("a", lease_s=60)
    for n in range(1, 4):
        await redis.command("SCRIPT", "FLUSH")
        await bus.commit(epoch, n, new_commit((1, n)), retention_s=60)
        await bus.publish_step("w.1", SchedulerOutput(epoch, n))
    assert len(await entries(bus, bus.keys.log())) == 3


# ---------------------------------------------------------------- Redis is full


async def test_a_full_server_refuses_submissions_and_lets_requests_end(bus: Bus, redis: Connection):
    epoch, _ = await bus.lead("a", lease_s=60)
    known = new_request()
    numbers = await bus.submit([known], limit=10, retention_s=60)
    [entry] = await entries(bus, bus.keys.requests())
    await bus.beat("worker", "w", "1", {"state": "ready"}, ttl_s=60)
    await redis.command("CONFIG SET", "maxmemory", 1)

    refused = [new_request(), new_request()]
    with pytest.raises(BusFullError):
        await bus.submit(refused, limit=10, retention_s=60)
    assert [await bus.request(request.req_id) for request in refused] == [{}, {}]
    assert await bus.submit([known], limit=10, retention_s=60) == numbers

    await bus.abort(AbortRequest(known.req_id))
    await bus.beat("worker", "w", "1", {"state": "draining"}, ttl_s=60, renew=True)
    await bus.publish_step("w.1", SchedulerOutput(epoch, 1))
    await bus.publish_result("w.1", new_result(epoch, 1, 42))
    commit = new_commit((numbers[0], 42))
    commit.outputs = {"g.1": EngineCoreOutputs()}
    commit.updates = {known.req_id: {"status": "finished"}}
    commit.checkpoints = [(known.req_id, 0, b"*\0\0\0")]
    await bus.commit(epoch, 1, commit, retention_s=60)
    await bus.bury(entry, "no")
    assert (await bus.lead("a", lease_s=60, held_epoch=epoch))[0] == epoch

    assert (await bus.processes("worker"))["w"]["state"] == "draining"
    assert len(await entries(bus, bus.keys.log())) == 1
    assert len(await entries(bus, bus.keys.out("g.1"))) == 1
    assert len(await entries(bus, bus.keys.results("w.1"))) == 1
    assert (await bus.request(known.req_id))["status"] == "finished"
    await redis.command("CONFIG SET", "maxmemory", 0)
    await bus.submit(refused, limit=10, retention_s=60)


# ---------------------------------------------------------------- what nobody should write


async def test_foreign_entries_are_bad_messages_and_nothing_worse(
    bus: Bus, redis: Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 2**20)
    for body in (b"", b"\x80\x04\x95.", b"\xc7\x01\x05x", b"\x93\x02\x01\x90", b"x" * 2**21):
        await redis.command("XADD", bus.keys.requests(), "*", "kind", "add", "body", body)
    await redis.command("XADD", bus.keys.requests(), "*", "neither", "kind nor body")
    found = await entries(bus, bus.keys.requests())
    for entry in found:
        with pytest.raises(codec.WireError) as refused:
            codec.decode(entry.body)
        await bus.bury(entry, str(refused.value))
    assert len(await entries(bus, bus.keys.dead())) == len(found) == 6
    assert await redis.command("XLEN", bus.keys.requests()) == 0


async def _outcome(call: Awaitable[object]) -> object:
    try:
        return await call
    except Exception as error:
        return error


async def _somebody_blocks(redis: Connection) -> None:
    while True:
        if (await redis.command("INFO", "clients"))["blocked_clients"]:
            return
