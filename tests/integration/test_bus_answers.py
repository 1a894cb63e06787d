"""What stands beside the requests of an answer: one for a key, and kept until it is over."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.fakes.samples import new_request
from wire.answer_record import AnswerRecord, Claim
from wire.bus import Bus, ClaimedError, Commit, QueueFullError
from wire.connection import Connection
from wire.keys import entry_id
from wire.messages import AbortRequest, CommittedTokens, EngineCoreRequest, token_ids

pytestmark = [pytest.mark.redis, pytest.mark.every_redis]


def answer(
    bus: Bus, num_requests: int = 1, *, key: str = "k", body: str = "b"
) -> tuple[list[EngineCoreRequest], AnswerRecord]:
    requests = [replace(new_request(), tenant="t") for _ in range(num_requests)]
    claim = Claim(bus.keys.idempotency("t", key), body) if key else None
    return requests, AnswerRecord(tuple(r.req_id for r in requests), "as JSON", claim)


async def submit(
    bus: Bus, requests: list[EngineCoreRequest], record: AnswerRecord, **options: str
) -> list[int]:
    return await bus.submit(requests, limit=10, retention_s=60, record=record, **options)


async def num_queued(redis: Connection, bus: Bus) -> int:
    count: int = await redis.command("XLEN", bus.keys.requests())
    return count


async def end(bus: Bus, number: int, epoch: int, requests: dict[str, int]) -> None:
    """Commit the end of these requests, by id and number."""
    commit = Commit(
        CommittedTokens(),
        updates={req_id: {"status": "finished"} for req_id in requests},
        checkpoints=[(req_id, 0, token_ids([7]).tobytes()) for req_id in requests],
        ended=[(req_id, entry_id(req)) for req_id, req in requests.items()],
    )
    await bus.commit(epoch, number, commit, retention_s=60)


async def test_a_record_stands_with_its_requests_and_can_be_read_again(bus: Bus):
    requests, record = answer(bus, 3)
    await submit(bus, requests, record)
    first, *others = [await bus.request(request.req_id) for request in requests]
    assert first["tenant"] == "t"
    assert first["status"] == "waiting"
    assert AnswerRecord.read(record.req_id, first) == record
    assert all(one["first"] == record.req_id and "rendering" not in one for one in others)
    assert await bus.submission(first["entry"]) == requests[0]
    assert await bus.submission("1-1") is None


async def test_an_answer_that_nobody_comes_back_for_leaves_only_its_choices(bus: Bus):
    requests, record = answer(bus, 2, key="")
    await submit(bus, requests, replace(record, rendering=""))
    first, second = [await bus.request(request.req_id) for request in requests]
    assert first.keys() == {"entry", "status", "tenant", "siblings"}
    assert second.keys() == {"entry", "status", "tenant"}


async def test_of_many_with_one_key_one_enters(bus: Bus, redis: Connection):
    answers = [answer(bus, 2) for _ in range(20)]
    results = await asyncio.gather(*(submit(bus, *one) for one in answers), return_exceptions=True)
    [entered] = [i for i, result in enumerate(results) if isinstance(result, list)]
    claim = f"{answers[entered][1].req_id} b"
    refused = [result for result in results if isinstance(result, ClaimedError)]
    assert [error.claim for error in refused] == [claim] * 19
    assert await bus.claim(bus.keys.idempotency("t", "k")) == claim
    assert await num_queued(redis, bus) == 2
    for i, (requests, _) in enumerate(answers):
        assert bool(await bus.request(requests[0].req_id)) == (i == entered)


async def test_a_repeated_submission_is_no_stranger_to_its_key(bus: Bus, redis: Connection):
    requests, record = answer(bus)
    assert await submit(bus, requests, record) == await submit(bus, requests, record)
    assert await num_queued(redis, bus) == 1


async def test_a_submission_that_was_refused_claims_nothing(bus: Bus):
    requests, record = answer(bus, 11)
    with pytest.raises(QueueFullError):
        await submit(bus, requests, record)
    assert await bus.claim(bus.keys.idempotency("t", "k")) is None


async def test_a_submission_that_was_aborted_before_claims_nothing(bus: Bus):
    requests, record = answer(bus)
    await bus.abort(AbortRequest(record.req_id))
    assert await submit(bus, requests, record) == [0]
    assert await bus.claim(bus.keys.idempotency("t", "k")) is None


async def test_one_answer_takes_the_place_of_one_that_failed(bus: Bus):
    failed, second, third = (answer(bus) for _ in range(3))
    await submit(bus, *failed)
    lapsed = failed[1].claim_value
    await submit(bus, *second, lapsed_claim=lapsed)
    with pytest.raises(ClaimedError) as refused:
        await submit(bus, *third, lapsed_claim=lapsed)
    assert refused.value.claim == second[1].claim_value


async def test_all_choices_are_kept_until_the_last_has_ended(bus: Bus, redis: Connection):
    requests, record = answer(bus, 3)
    numbers = await submit(bus, requests, record)
    epoch, _ = await bus.lead("leader", lease_s=60)
    ids = [request.req_id for request in requests]
    kept = [bus.keys.request(i) for i in ids] + [bus.keys.idempotency("t", "k")]
    for done in range(2):
        await end(bus, done + 1, epoch, {ids[done]: numbers[done]})
        kept.append(bus.keys.tokens(ids[done]))
        assert [await redis.command("PTTL", key) for key in kept] == [-1] * len(kept)
    await end(bus, 3, epoch, {ids[2]: numbers[2]})
    for key in [*kept, bus.keys.tokens(ids[2])]:
        assert 50_000 < await redis.command("PTTL", key) <= 60_000
    assert await num_queued(redis, bus) == 0


async def test_choices_that_end_together_are_kept_together(bus: Bus, redis: Connection):
    requests, record = answer(bus, 2)
    numbers = await submit(bus, requests, record)
    epoch, _ = await bus.lead("leader", lease_s=60)
    ids = [request.req_id for request in requests]
    await end(bus, 1, epoch, dict(zip(ids, numbers, strict=True)))
    for key in await redis.command("KEYS", "*:req:*"):
        assert await redis.command("PTTL", key) > 0


async def test_choices_of_a_plain_answer_are_kept_each_for_itself(bus: Bus, redis: Connection):
    requests, record = answer(bus, 2, key="")
    numbers = await submit(bus, requests, replace(record, rendering=""))
    epoch, _ = await bus.lead("leader", lease_s=60)
    await end(bus, 1, epoch, {requests[0].req_id: numbers[0]})
    assert await redis.command("PTTL", bus.keys.request(requests[0].req_id)) > 0
    assert await redis.command("PTTL", bus.keys.request(requests[1].req_id)) == -1


async def test_what_redis_lost_comes_back_with_the_request(bus: Bus, redis: Connection):
    requests, record = answer(bus, 2)
    await submit(bus, requests, record)
    await redis.command("FLUSHALL")
    for request in requests:
        await bus.resubmit(request, record)
    first = await bus.request(record.req_id)
    assert AnswerRecord.read(record.req_id, first) == record
    assert (await bus.request(requests[1].req_id))["first"] == record.req_id
    assert await bus.claim(bus.keys.idempotency("t", "k")) == record.claim_value
    again, other = answer(bus)
    with pytest.raises(ClaimedError):
        await submit(bus, again, other)


async def test_a_key_that_is_anothers_by_now_stays_so(bus: Bus):
    (old, old_record), (new, new_record) = answer(bus), answer(bus)
    await submit(bus, new, new_record)
    await bus.resubmit(old[0], old_record)
    assert await bus.claim(bus.keys.idempotency("t", "k")) == new_record.claim_value
