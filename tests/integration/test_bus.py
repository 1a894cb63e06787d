"""What the bus promises of admission, leadership, steps and reading, on real servers."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.samples import new_request, new_result
from tests.fakes.streams import entries
from wire import codec
from wire.bus import Bus, Entry, FencedError, QueueFullError
from wire.connection import MAX_CONNECTIONS, Connection
from wire.keys import entry_id
from wire.messages import AbortRequest, SchedulerOutput

pytestmark = [pytest.mark.redis, pytest.mark.every_redis]


# ---------------------------------------------------------------- admission


async def test_a_submitted_request_is_in_the_queue_under_its_number(bus: Bus):
    request = new_request()
    [number] = await bus.submit([request], limit=1, retention_s=60)
    [entry] = await entries(bus, bus.keys.requests())
    assert entry.entry_id == entry_id(number)
    assert entry.fields["kind"] == b"add"
    assert entry.fields["id"] == request.req_id.encode()
    assert codec.decode(entry.body) == request
    known = await bus.request(request.req_id)
    assert known == {"entry": entry.entry_id, "status": "waiting", "tenant": "default"}


async def test_a_batch_enters_up_to_the_exact_limit(bus: Bus):
    numbers = await bus.submit([new_request() for _ in range(5)], limit=5, retention_s=60)
    assert numbers == sorted(set(numbers))
    with pytest.raises(QueueFullError) as refused:
        await bus.submit([new_request()], limit=5, retention_s=60)
    assert refused.value.num_waiting == 5
    assert len(await entries(bus, bus.keys.requests())) == 5


async def test_a_batch_over_the_limit_leaves_nothing_behind(bus: Bus):
    await bus.submit([new_request() for _ in range(3)], limit=5, retention_s=60)
    refused = [new_request() for _ in range(3)]
    with pytest.raises(QueueFullError):
        await bus.submit(refused, limit=5, retention_s=60)
    assert len(await entries(bus, bus.keys.requests())) == 3
    assert [await bus.request(request.req_id) for request in refused] == [{}, {}, {}]


async def test_a_repeated_submission_keeps_its_entries(bus: Bus):
    batch = [new_request(), new_request()]
    numbers = await bus.submit(batch, limit=2, retention_s=60)
    for limit in (2, 1):  # though the queue is full, or more than that by now
        assert await bus.submit(batch, limit=limit, retention_s=60) == numbers
    assert len(await entries(bus, bus.keys.requests())) == 2


async def test_a_repetition_with_one_more_request_adds_only_that(bus: Bus):
    first, second = new_request(), new_request()
    [number] = await bus.submit([first], limit=2, retention_s=60)
    numbers = await bus.submit([first, second], limit=2, retention_s=60)
    assert numbers[0] == number
    assert len(await entries(bus, bus.keys.requests())) == 2


async def test_running_requests_do_not_count_as_waiting(bus: Bus, redis: Connection):
    await bus.submit([new_request() for _ in range(4)], limit=4, retention_s=60)
    await redis.command("HSET", bus.keys.stats(), "num_requests_running", 3)
    await bus.submit([new_request() for _ in range(3)], limit=4, retention_s=60)
    with pytest.raises(QueueFullError) as refused:
        await bus.submit([new_request()], limit=4, retention_s=60)
    assert refused.value.num_waiting == 4


async def test_more_running_than_queued_is_an_empty_queue(bus: Bus, redis: Connection):
    await redis.command("HSET", bus.keys.stats(), "num_requests_running", 100)
    with pytest.raises(QueueFullError) as refused:
        await bus.submit([new_request() for _ in range(3)], limit=2, retention_s=60)
    assert refused.value.num_waiting == 0


async def test_many_submissions_at_once_all_enter_over_few_connections(bus: Bus, redis: Connection):
    async with asyncio.TaskGroup() as group:
        for _ in range(300):
            group.create_task(bus.submit([new_request()], limit=300, retention_s=60))
    assert len(await entries(bus, bus.keys.requests())) == 300
    info = await redis.command("INFO", "clients")
    assert info["connected_clients"] <= MAX_CONNECTIONS + 1


async def test_a_request_of_a_hundred_thousand_tokens_passes(bus: Bus):
    request = new_request(num_prompt_tokens=100_000)
    await bus.submit([request], limit=1, retention_s=60)
    [entry] = await entries(bus, bus.keys.requests())
    assert codec.decode(entry.body) == request


# ---------------------------------------------------------------- abort


async def test_an_abort_follows_its_request_in_the_queue(bus: Bus):
    request = new_request()
    await bus.submit([request], limit=1, retention_s=60)
    abort = AbortRequest(request.req_id, "stop", 7)
    await bus.abort(abort)  # passes though the queue is at its limit
    added, aborted = await entries(bus, bus.keys.requests())
    assert aborted.fields["kind"] == b"abort"
    assert codec.decode(aborted.body) == abort
    assert (await bus.request(request.req_id))["entry"] == added.entry_id


async def test_a_submission_that_comes_after_its_abort_stays_out(bus: Bus, redis: Connection):
    late, other = new_request(), new_request()
    await bus.abort(AbortRequest(late.req_id))
    numbers = await bus.submit([late, other], limit=2, retention_s=60)
    assert numbers[0] == 0
    kinds = [entry.fields["kind"] for entry in await entries(bus, bus.keys.requests())]
    assert kinds == [b"abort", b"add"]
    assert await redis.command("PTTL", bus.keys.request(late.req_id)) > 0


# ---------------------------------------------------------------- leadership


async def test_one_leads_and_renews_while_others_are_refused(bus: Bus):
    epoch, now_ms = await bus.lead("a", lease_s=60)
    assert epoch >= now_ms > 0
    assert (await bus.lead("a", lease_s=60, held_epoch=epoch))[0] == epoch
    assert (await bus.lead("b", lease_s=60))[0] == 0
    assert (await bus.lead("b", lease_s=60, held_epoch=epoch))[0] == 0


async def test_an_expired_lease_is_taken_and_its_owner_cannot_renew(bus: Bus, redis: Connection):
    old, _ = await bus.lead("a", lease_s=60)
    await redis.command("DEL", bus.keys.leader())  # what its expiry does
    new, _ = await bus.lead("b", lease_s=60)
    assert new > old
    assert (await bus.lead("a", lease_s=60, held_epoch=old))[0] == 0
    await redis.command("DEL", bus.keys.leader())
    assert (await bus.lead("a", lease_s=60, held_epoch=old))[0] == 0  # the epoch has moved on


async def test_a_lease_that_nobody_took_meanwhile_can_be_renewed(bus: Bus, redis: Connection):
    epoch, _ = await bus.lead("a", lease_s=60)
    await redis.command("DEL", bus.keys.leader())
    assert (await bus.lead("a", lease_s=60, held_epoch=epoch))[0] == epoch
    assert await redis.command("GET", bus.keys.leader()) == b"a"


async def test_the_lease_ends_by_itself(bus: Bus, redis: Connection):
    await bus.lead("a", lease_s=1.5)
    assert 0 < await redis.command("PTTL", bus.keys.leader()) <= 1500


async def test_epochs_grow_though_they_come_within_a_millisecond(bus: Bus):
    epochs = [(await bus.lead("a", lease_s=60))[0] for _ in range(20)]
    assert epochs == sorted(set(epochs))


async def test_epochs_grow_beyond_a_wipe_and_a_clock_that_went_back(bus: Bus, redis: Connection):
    before, _ = await bus.lead("a", lease_s=60, floor=2**52)  # a clock far ahead
    await redis.command("FLUSHALL")
    assert (await bus.lead("a", lease_s=60, held_epoch=before))[0] == 0
    after, _ = await bus.lead("a", lease_s=60, floor=before + 1)
    assert after == before + 1


async def test_only_the_leader_can_release_the_lease(bus: Bus):
    epoch, _ = await bus.lead("a", lease_s=60)
    await bus.release_lead("b")
    assert (await bus.lead("b", lease_s=60))[0] == 0
    await bus.release_lead("a")
    assert (await bus.lead("b", lease_s=60))[0] > epoch


# ---------------------------------------------------------------- steps and results


async def test_a_step_can_be_read_by_people_and_by_the_worker(bus: Bus):
    step = SchedulerOutput(epoch=5, step_id=1, num_decodes=3, finished_reqs=[1, 2])
    await bus.publish_step("w.1", step)
    [entry] = await entries(bus, bus.keys.steps("w.1"))
    assert entry.entry_id == "5-1"
    assert entry.fields["decodes"] == b"3"
    assert entry.fields["finished"] == b"2"
    assert codec.decode_as(SchedulerOutput, entry.body) == step


async def test_a_repeated_step_stands_once(bus: Bus):
    steps = [SchedulerOutput(epoch=5, step_id=n) for n in range(3)]
    for step in [*steps, *steps]:
        await bus.publish_step("w.1", step)
    assert [e.entry_id for e in await entries(bus, bus.keys.steps("w.1"))] == ["5-0", "5-1", "5-2"]


async def test_a_step_of_a_deposed_leader_is_refused(bus: Bus):
    await bus.publish_step("w.1", SchedulerOutput(epoch=6, step_id=0))
    with pytest.raises(FencedError):
        await bus.publish_step("w.1", SchedulerOutput(epoch=5, step_id=1))
    assert [entry.entry_id for entry in await entries(bus, bus.keys.steps("w.1"))] == ["6-0"]


async def test_a_repeated_result_stands_once(bus: Bus):
    await bus.publish_result("w.1", new_result(5, 1, 42))
    await bus.publish_result("w.1", new_result(5, 1, 42))
    [entry] = await entries(bus, bus.keys.results("w.1"))
    assert codec.decode(entry.body) == new_result(5, 1, 42)


async def test_a_result_behind_a_fence_is_dropped_in_silence(bus: Bus, redis: Connection):
    await redis.command("XADD", bus.keys.results("w.1"), "6-0", "fence", "1")
    await bus.publish_result("w.1", new_result(5, 1, 42))
    assert [entry.entry_id for entry in await entries(bus, bus.keys.results("w.1"))] == ["6-0"]


async def test_streams_of_steps_and_results_stay_short(bus: Bus):
    for n in range(1200):
        await bus.publish_step("w.1", SchedulerOutput(epoch=5, step_id=n))
    found = await entries(bus, bus.keys.steps("w.1"))
    assert 256 <= len(found) <= 512
    assert found[-1].entry_id == "5-1199"


# ---------------------------------------------------------------- reading


async def test_a_reader_gets_every_entry_of_all_its_streams_once_in_order(bus: Bus):
    for n in range(10):
        await bus.publish_result("w.1", new_result(5, n, n))
        await bus.publish_result("w.2", new_result(5, n, 100 + n))
    one, two = bus.keys.results("w.1"), bus.keys.results("w.2")
    reader = bus.reader({one: "0-0", two: "5-3"})
    found: list[Entry] = []
    while page := await reader.read(block_ms=0, count=3):
        assert len(page) <= 6
        found += page
    await reader.close()
    assert [e.entry_id for e in found if e.key == one] == [f"5-{n}" for n in range(10)]
    assert [e.entry_id for e in found if e.key == two] == [f"5-{n}" for n in range(4, 10)]
    assert reader.cursors == {one: "5-9", two: "5-9"}


async def test_a_waiting_reader_wakes_up_for_an_entry(bus: Bus):
    key = bus.keys.results("w.1")
    reader = bus.reader({key: "0-0"}, max_block_ms=60_000)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(reader.read(block_ms=60_000))
        await bus.publish_result("w.1", new_result(5, 1, 42))
    await reader.close()
    assert [entry.entry_id for entry in reading.result()] == ["5-1"]


async def test_a_reader_never_blocks_longer_than_its_connection_bears(bus: Bus):
    reader = bus.reader({bus.keys.results("w.1"): "0-0"}, max_block_ms=20)
    assert await reader.read(block_ms=3_600_000) == []
    await reader.close()


async def test_a_reader_of_nothing_reads_nothing(bus: Bus):
    reader = bus.reader({})
    assert await reader.read(block_ms=1) == []
    await reader.close()


async def test_a_cancelled_read_loses_no_entry(bus: Bus):
    key = bus.keys.results("w.1")
    reader = bus.reader({key: "0-0"})
    seen: list[str] = []
    for n in range(30):
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(reader.read(block_ms=1000))
            await bus.publish_result("w.1", new_result(5, n, n))
            reading.cancel()  # before, while or after the reply comes in
        if not reading.cancelled():
            seen += [entry.entry_id for entry in reading.result()]
    while page := await reader.read(block_ms=0):
        seen += [entry.entry_id for entry in page]
    await reader.close()
    assert seen == [f"5-{n}" for n in range(30)]


async def test_a_scan_walks_the_whole_stream_page_by_page(bus: Bus):
    for n in range(10):
        await bus.publish_result("w.1", new_result(5, n, n))
    pages = [page async for page in bus.scan(bus.keys.results("w.1"), page=4)]
    assert [len(page) for page in pages] == [4, 4, 2]
    assert [entry.entry_id for page in pages for entry in page] == [f"5-{n}" for n in range(10)]
    assert [page async for page in bus.scan(bus.keys.log())] == []


async def test_an_entry_that_nobody_understands_is_still_an_entry(bus: Bus, redis: Connection):
    key = bus.keys.requests()
    await redis.command("XADD", key, "1-1", b"\xff\xfe", b"\x00")
    reader = bus.reader({key: "0-0"})
    [read] = await reader.read(block_ms=0)
    await reader.close()
    [[scanned]] = [page async for page in bus.scan(key)]
    assert read == scanned
    assert read.body == b""


async def test_a_buried_entry_is_set_aside_once_with_its_reason(bus: Bus):
    request = new_request()
    await bus.submit([request], limit=1, retention_s=60)
    [entry] = await entries(bus, bus.keys.requests())
    for _ in range(2):
        await bus.bury(entry, "cannot be read: \ud800" + "x" * 1000)
    assert await entries(bus, bus.keys.requests()) == []
    [dead] = await entries(bus, bus.keys.dead())
    assert dead.body == entry.body
    assert dead.fields["entry"].decode() == entry.entry_id
    assert dead.fields["stream"].decode() == entry.key
    assert len(dead.fields["reason"]) <= 500
    assert dead.fields["reason"].startswith(b"cannot be read: ?")
