"""What admission promises of quotas: a minute's worth, never charged twice, given back at the end.

Time is moved by moving the moment at which a bucket was last looked at.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.fakes.samples import new_commit, new_request
from wire.bus import Bus
from wire.connection import Connection
from wire.keys import entry_id
from wire.messages import EngineCoreRequest
from wire.quota import Quota, QuotaError

pytestmark = [pytest.mark.redis, pytest.mark.every_redis]

COSTS = 4 + 16
"""Tokens that a `new_request` counts for: its prompt and its most output."""

STOPPED_S = 3600.0


async def submit(bus: Bus, quota: Quota, *requests: EngineCoreRequest) -> list[int]:
    return await bus.submit(requests or [new_request()], limit=100, retention_s=60, quota=quota)


async def pass_time(bus: Bus, redis: Connection, seconds: float) -> None:
    await redis.command("HINCRBYFLOAT", bus.keys.quota("default"), "at", -seconds * 1000)


async def stop_time(bus: Bus, redis: Connection) -> None:
    """Let the bucket believe that it was looked at in a moment to come: until then it stays."""
    await pass_time(bus, redis, -STOPPED_S)


async def level(bus: Bus, redis: Connection, what: str) -> float:
    return float(await redis.command("HGET", bus.keys.quota("default"), what))


async def test_a_minute_has_as_many_requests_as_the_quota_says(bus: Bus, redis: Connection):
    quota = Quota(requests_per_minute=6)
    await submit(bus, quota, *(new_request() for _ in range(6)))
    await stop_time(bus, redis)
    with pytest.raises(QuotaError) as refused:
        await submit(bus, quota)
    assert refused.value.what == "requests"
    assert refused.value.wait_s == 10  # one more every ten seconds
    await pass_time(bus, redis, STOPPED_S + 10)
    await submit(bus, quota)
    with pytest.raises(QuotaError):
        await submit(bus, quota)


async def test_what_was_not_used_is_not_saved_up(bus: Bus, redis: Connection):
    quota = Quota(requests_per_minute=2)
    await submit(bus, quota)
    await pass_time(bus, redis, 3600)
    for _ in range(2):
        await submit(bus, quota)
    with pytest.raises(QuotaError):
        await submit(bus, quota)


async def test_tokens_count_as_what_they_may_become(bus: Bus, redis: Connection):
    quota = Quota(tokens_per_minute=3 * COSTS)
    await submit(bus, quota, new_request(), new_request())
    assert await level(bus, redis, "tokens") == COSTS
    await stop_time(bus, redis)
    with pytest.raises(QuotaError) as refused:
        await submit(bus, quota, new_request(), new_request())
    assert refused.value.what == "tokens"
    assert refused.value.wait_s == 20
    assert (await bus.queue_lengths([]))["requests"] == 2


async def test_a_repeated_submission_is_not_charged_again(bus: Bus, redis: Connection):
    quota, batch = Quota(100, 100 * COSTS), [new_request(), new_request()]
    numbers = await submit(bus, quota, *batch)
    for _ in range(3):
        assert await submit(bus, quota, *batch) == numbers
    assert await level(bus, redis, "requests") == 98
    await stop_time(bus, redis)
    assert await submit(bus, quota, batch[0], new_request()) != numbers
    assert await level(bus, redis, "requests") == 97
    assert await level(bus, redis, "tokens") == 97 * COSTS


async def test_a_repetition_passes_though_the_quota_is_used_up(bus: Bus):
    quota, request = Quota(requests_per_minute=1), new_request()
    numbers = await submit(bus, quota, request)
    with pytest.raises(QuotaError):
        await submit(bus, quota)
    assert await submit(bus, quota, request) == numbers


async def test_what_is_refused_costs_nothing(bus: Bus, redis: Connection):
    quota = Quota(requests_per_minute=10, tokens_per_minute=COSTS)
    await submit(bus, quota)
    before = await redis.command("HGETALL", bus.keys.quota("default"))
    for _ in range(3):
        with pytest.raises(QuotaError):
            await submit(bus, quota)
    assert await redis.command("HGETALL", bus.keys.quota("default")) == before


async def test_more_than_a_minute_holds_waits_for_a_full_bucket(bus: Bus, redis: Connection):
    quota = Quota(tokens_per_minute=COSTS // 2)
    await submit(bus, quota)
    assert await level(bus, redis, "tokens") == -COSTS // 2
    await pass_time(bus, redis, 119)
    with pytest.raises(QuotaError):
        await submit(bus, quota)
    await pass_time(bus, redis, 1)
    await submit(bus, quota)


async def test_a_tenant_cannot_use_up_anothers_quota(bus: Bus):
    quota = Quota(requests_per_minute=1)
    await submit(bus, quota)
    other = replace(new_request(), tenant="other")
    await submit(bus, quota, other)
    with pytest.raises(QuotaError):
        await submit(bus, quota)


async def test_a_request_that_ended_gives_back_what_it_did_not_generate(
    bus: Bus, redis: Connection
):
    epoch, _ = await bus.lead("me.1", 60)
    quota, request = Quota(tokens_per_minute=COSTS), new_request()
    [number] = await submit(bus, quota, request)
    commit = new_commit()
    known: dict[str, str | int] = {"num_prompt_tokens": 4, "num_output_tokens": 6}
    commit.updates = {request.req_id: known}
    commit.ended = [(request.req_id, entry_id(number))]
    for _ in range(2):  # the second changes nothing
        await bus.commit(epoch, 1, commit, retention_s=60)
        assert await level(bus, redis, "tokens") == 10
    again = new_commit()
    again.ended = commit.ended  # nor would another commit of the same end
    await bus.commit(epoch, 2, again, retention_s=60)
    assert await level(bus, redis, "tokens") == 10


async def test_a_bucket_is_forgotten_once_it_would_be_full(bus: Bus, redis: Connection):
    await submit(bus, Quota(requests_per_minute=4))
    assert 14_000 < await redis.command("PTTL", bus.keys.quota("default")) <= 15_000
    await submit(bus, Quota(tokens_per_minute=COSTS // 2))
    assert await redis.command("PTTL", bus.keys.quota("default")) > 100_000


async def test_without_a_quota_nothing_is_counted(bus: Bus, redis: Connection):
    request = new_request()
    await submit(bus, Quota(), request)
    assert await redis.command("EXISTS", bus.keys.quota("default")) == 0
    assert "reserved_tokens" not in await bus.request(request.req_id)
