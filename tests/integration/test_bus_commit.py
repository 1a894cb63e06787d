"""What a commit promises: tokens exist once, all of it or nothing, and one epoch at a time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.samples import new_commit, new_request
from tests.fakes.streams import entries
from wire import codec
from wire import commit as commit_module
from wire.bus import Bus, Commit, FencedError
from wire.connection import Connection
from wire.keys import entry_id
from wire.messages import CommittedTokens, EngineCoreOutputs, FinishedRequest, token_ids

pytestmark = [pytest.mark.redis, pytest.mark.every_redis]


@pytest.fixture
async def epoch(bus: Bus) -> int:
    return (await bus.lead("leader", lease_s=60))[0]


async def log_ids(bus: Bus) -> list[str]:
    return [entry.entry_id for entry in await entries(bus, bus.keys.log())]


async def everything(redis: Connection) -> dict[bytes, Any]:
    """All that the server holds, for comparison."""
    found = {}
    for key in sorted(await redis.command("KEYS", "*")):
        found[key] = await redis.command("DUMP", key)
    return found


async def test_a_commit_writes_the_log_the_outputs_and_the_request(
    bus: Bus, redis: Connection, epoch: int
):
    request = new_request()
    [number] = await bus.submit([request], limit=1, retention_s=60)
    outputs = EngineCoreOutputs(
        handles=token_ids([1]),
        starts=token_ids([0]),
        token_ids=token_ids([42]),
        finished=[FinishedRequest(1, 1, "stop")],
    )
    commit = new_commit((number, 42))
    commit.outputs = {"g.1": outputs, "g.2": EngineCoreOutputs()}
    commit.updates = {request.req_id: {"status": "finished", "num_output_tokens": 1}}
    commit.checkpoints = [(request.req_id, 0, token_ids([42]).tobytes())]
    commit.ended = [(request.req_id, entry_id(number))]
    commit.stats = {"num_requests_running": 0, "kv_cache_usage_perc": 0.5}
    await bus.commit(epoch, 1, commit, retention_s=60)

    [logged] = await entries(bus, bus.keys.log())
    assert logged.entry_id == f"{epoch}-1"
    assert logged.fields["tokens"] == b"1"
    assert codec.decode(logged.body) == commit.tokens
    [out] = await entries(bus, bus.keys.out("g.1"))
    assert out.entry_id == f"{epoch}-1"
    assert codec.decode(out.body) == outputs
    assert len(await entries(bus, bus.keys.out("g.2"))) == 1
    assert await entries(bus, bus.keys.requests()) == []
    known = await bus.request(request.req_id)
    assert known["status"] == "finished"
    assert known["num_output_tokens"] == "1"
    assert await bus.tokens([request.req_id]) == [token_ids([42]).tobytes()]
    assert await bus.stats() == {"num_requests_running": "0", "kv_cache_usage_perc": "0.5"}


async def test_only_what_has_ended_expires(bus: Bus, redis: Connection, epoch: int):
    ended, running = new_request(), new_request()
    first, _ = await bus.submit([ended, running], limit=2, retention_s=60)
    commit = new_commit()
    commit.checkpoints = [(request.req_id, 0, b"\1\0\0\0") for request in (ended, running)]
    commit.ended = [(ended.req_id, entry_id(first))]
    commit.outputs = {"g.1": EngineCoreOutputs()}
    await bus.commit(epoch, 1, commit, retention_s=60)
    expiring = [
        key for key in await redis.command("KEYS", "*") if await redis.command("PTTL", key) > 0
    ]
    assert sorted(key.decode() for key in expiring) == sorted(
        [
            bus.keys.leader(),
            bus.keys.out("g.1"),
            bus.keys.request(ended.req_id),
            bus.keys.tokens(ended.req_id),
        ]
    )


async def test_done_controls_leave_the_queue(bus: Bus, redis: Connection, epoch: int):
    await redis.command("XADD", bus.keys.requests(), "7-1", "kind", "abort")
    await redis.command("XADD", bus.keys.requests(), "7-2", "kind", "abort")
    commit = new_commit()
    commit.done_entries = ["7-1", "6-6"]  # one of them went before
    await bus.commit(epoch, 1, commit, retention_s=60)
    assert [entry.entry_id for entry in await entries(bus, bus.keys.requests())] == ["7-2"]


async def test_a_repeated_commit_is_applied_once(bus: Bus, redis: Connection, epoch: int):
    commit = new_commit((1, 10))
    commit.outputs = {"g.1": EngineCoreOutputs()}
    commit.stats = {"num_commits_total": 1}
    await bus.commit(epoch, 1, commit, retention_s=60)
    await redis.command("HSET", bus.keys.stats(), "num_commits_total", 7)
    before = await everything(redis)
    await bus.commit(epoch, 1, commit, retention_s=60)
    assert await everything(redis) == before
    await bus.commit(epoch, 2, new_commit((1, 11)), retention_s=60)
    assert await log_ids(bus) == [f"{epoch}-1", f"{epoch}-2"]


@pytest.mark.parametrize("number", [0, 2, 4, 1000])
async def test_a_gap_or_an_old_number_is_refused_before_any_write(
    bus: Bus, redis: Connection, epoch: int, number: int
):
    for n in range(1, 4):
        await bus.commit(epoch, n, new_commit((1, n)), retention_s=60)
    before = await everything(redis)
    commit = new_commit((1, 10), is_checkpoint=True)
    commit.outputs = {"g.1": EngineCoreOutputs()}
    commit.updates = {"r": {"status": "finished"}}
    commit.stats = {"num_commits_total": 1}
    if number == 4:  # the right number, of a leader that has been deposed
        await redis.command("SET", bus.keys.epoch(), epoch + 1)
        before = await everything(redis)
    with pytest.raises(FencedError):
        await bus.commit(epoch, number, commit, retention_s=60)
    assert await everything(redis) == before


async def test_a_new_epoch_counts_from_one_behind_the_old_entries(bus: Bus, epoch: int):
    await bus.commit(epoch, 1, new_commit((1, 10)), retention_s=60)
    await bus.commit(epoch, 2, new_commit((1, 11)), retention_s=60)
    later, _ = await bus.lead("leader", lease_s=60)
    with pytest.raises(FencedError):
        await bus.commit(epoch, 3, new_commit((1, 12)), retention_s=60)
    with pytest.raises(FencedError):
        await bus.commit(later, 3, new_commit((1, 12)), retention_s=60)
    await bus.commit(later, 1, new_commit((1, 12)), retention_s=60)
    assert await log_ids(bus) == [f"{epoch}-1", f"{epoch}-2", f"{later}-1"]


async def test_an_epoch_that_was_rolled_back_cannot_commit_before_a_later_one(
    bus: Bus, redis: Connection, epoch: int
):
    await bus.commit(epoch, 1, new_commit((1, 10)), retention_s=60)
    await redis.command("SET", bus.keys.epoch(), epoch - 1)
    before = await everything(redis)
    with pytest.raises(FencedError):
        await bus.commit(epoch - 1, 1, new_commit((1, 11), is_checkpoint=True), retention_s=60)
    assert await everything(redis) == before


async def test_after_a_wipe_the_leader_is_fenced(bus: Bus, redis: Connection, epoch: int):
    await bus.commit(epoch, 1, new_commit((1, 10)), retention_s=60)
    await redis.command("FLUSHALL")
    with pytest.raises(FencedError):
        await bus.commit(epoch, 2, new_commit((1, 11)), retention_s=60)
    assert await redis.command("DBSIZE") == 0


async def test_a_lost_log_under_a_held_epoch_is_a_fence(bus: Bus, redis: Connection, epoch: int):
    await bus.commit(epoch, 1, new_commit((1, 10)), retention_s=60)
    await redis.command("DEL", bus.keys.log())
    with pytest.raises(FencedError):
        await bus.commit(epoch, 2, new_commit((1, 11)), retention_s=60)


async def test_a_checkpoint_trims_the_log_and_leaves_it_readable(
    bus: Bus, redis: Connection, epoch: int
):
    for n in range(1, 301):
        await bus.commit(epoch, n, new_commit((1, n)), retention_s=60)
    reader = bus.reader({bus.keys.log(): f"{epoch}-300"})
    checkpoint = new_commit((1, 301), is_checkpoint=True)
    output = token_ids(list(range(1, 302))).tobytes()
    checkpoint.checkpoints = [("r", 0, output)]
    await bus.commit(epoch, 301, checkpoint, retention_s=60)
    await bus.commit(epoch, 301, checkpoint, retention_s=60)
    await bus.commit(epoch, 302, new_commit((1, 302)), retention_s=60)
    assert await log_ids(bus) == [f"{epoch}-301", f"{epoch}-302"]
    assert [entry.entry_id for entry in await reader.read(0)] == await log_ids(bus)
    assert await bus.tokens(["r", "unknown"]) == [output, b""]
    await reader.close()


async def test_a_checkpoint_continues_the_output_where_it_stood(bus: Bus, epoch: int):
    tokens = [5, 2**32 - 1, 0, 7]
    for n, token in enumerate(tokens):
        commit = new_commit((1, token), is_checkpoint=True)
        commit.checkpoints = [("r", 4 * n, token_ids([token]).tobytes())]
        await bus.commit(epoch, n + 1, commit, retention_s=60)
    [output] = await bus.tokens(["r"])
    assert list(token_ids(output)) == tokens


async def test_the_stream_of_a_silent_gateway_stays_short(
    bus: Bus, epoch: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(commit_module, "OUT_LENGTH", 400)
    for n in range(1, 900):
        commit = Commit(CommittedTokens(), outputs={"g.1": EngineCoreOutputs()})
        await bus.commit(epoch, n, commit, retention_s=60)
    assert 400 <= len(await entries(bus, bus.keys.out("g.1"))) <= 600


async def test_one_key_of_a_wrong_type_does_not_stop_the_rest(
    bus: Bus, redis: Connection, epoch: int
):
    await redis.command("SET", bus.keys.request("r"), "not a hash")
    commit = new_commit((1, 10))
    commit.updates = {"r": {"status": "running"}, "s": {"status": "running"}}
    await bus.commit(epoch, 1, commit, retention_s=60)
    assert await bus.request("s") == {"status": "running"}
    assert await log_ids(bus) == [f"{epoch}-1"]


async def test_five_thousand_requests_end_in_one_commit(bus: Bus, redis: Connection, epoch: int):
    requests = [new_request() for _ in range(5000)]
    numbers = []
    for i in range(0, 5000, 500):
        numbers += await bus.submit(requests[i : i + 500], limit=5000, retention_s=60)
    commit = new_commit(*((number, 1) for number in numbers))
    row = {"status": "finished", "finish_reason": "stop", "num_output_tokens": 1, "worker": "w"}
    commit.updates = {request.req_id: {**row} for request in requests}
    commit.checkpoints = [(request.req_id, 0, b"\1\0\0\0") for request in requests]
    commit.ended = [
        (request.req_id, entry_id(number))
        for request, number in zip(requests, numbers, strict=True)
    ]
    commit.done_entries = [f"1-{n}" for n in range(5000)]
    commit.outputs = {f"g.{n}": EngineCoreOutputs() for n in range(5000)}
    commit.stats = {f"figure_{n}": n for n in range(1000)}
    await bus.commit(epoch, 1, commit, retention_s=60)
    assert await redis.command("XLEN", bus.keys.requests()) == 0
    known = await bus.request(requests[-1].req_id)
    assert known["finish_reason"] == "stop"
    assert await redis.command("PTTL", bus.keys.tokens(requests[-1].req_id)) > 0
    assert len(await bus.stats()) == 1000
    assert len(await entries(bus, bus.keys.out("g.4999"))) == 1
