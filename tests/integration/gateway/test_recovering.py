"""What a gateway does when the scheduler says too much, too little, or nothing of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway import output_router
from gateway.recovery import MAX_RESUBMISSIONS
from tests.fakes.gateway_world import World, ids_of
from tests.fakes.past_the_bus import command
from tests.fakes.scripted_engine import saying
from wire.messages import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, crc_of, token_ids

pytestmark = pytest.mark.redis

TEXT = "one two three four five six"
IDS = ids_of(TEXT)
NUM_SAID = 2
assert len(IDS) > NUM_SAID + 2


@asynccontextmanager
async def half_said(world: World) -> AsyncIterator[EngineCoreRequest]:
    """Let the engine say the first tokens of an answer; in the end the client must have all."""
    engine = world.engine
    engine.script = saying(IDS[:NUM_SAID], finish_reason=None)
    answer = asyncio.ensure_future(world.complete("x", max_tokens=50))
    await engine.wait_for(lambda: len(engine.requests) == 1)
    [request] = engine.requests
    await engine.wait_for(lambda: engine.num_said(request.req_id) == NUM_SAID)
    engine.be_silent()
    engine.script = saying(IDS)
    yield request
    if engine.num_running:
        engine.say_more(request.req_id)
        engine.talk()
    status, body = await answer
    assert (status, body["choices"][0]["text"]) == (200, TEXT)
    assert body["usage"]["completion_tokens"] == len(IDS)
    assert not engine.aborts


def row(request: EngineCoreRequest, start: int, token: int) -> EngineCoreOutputs:
    return EngineCoreOutputs(token_ids([request.handle]), token_ids([start]), token_ids([token]))


@pytest.mark.parametrize(
    ("start", "token"), [(NUM_SAID + 3, 5), (NUM_SAID - 1, 5)], ids=["gap", "contradiction"]
)
async def test_what_does_not_fit_is_asked_for_again_under_a_new_handle(
    world: World, start: int, token: int
) -> None:
    engine = world.engine
    async with half_said(world) as request:
        await engine.send(request.gateway, row(request, start, token))
        await engine.wait_for(lambda: bool(engine.resumes))
        [resume] = engine.resumes
        assert resume.handle != request.handle
        assert resume.num_output_tokens == NUM_SAID
        assert resume.crc == crc_of(token_ids(IDS[:NUM_SAID]))
        await engine.send(request.gateway, row(request, NUM_SAID, 6))  # nobody's by now


async def test_an_end_too_early_is_no_end(world: World) -> None:
    engine = world.engine
    async with half_said(world) as request:
        end = FinishedRequest(request.handle, NUM_SAID + 1, "length")
        await engine.send(request.gateway, EngineCoreOutputs(finished=[end]))
        await engine.wait_for(lambda: bool(engine.resumes))


async def test_what_the_scheduler_has_lost_is_submitted_again_with_what_the_client_has(
    world: World,
) -> None:
    engine = world.engine
    async with half_said(world) as request:
        engine.forget(request.req_id)
        await engine.send(request.gateway, row(request, NUM_SAID + 1, 5))
        await engine.wait_for(lambda: len(engine.requests) == 2)
        again = engine.requests[1]
        assert again.req_id == request.req_id
        assert list(again.output_token_ids) == IDS[:NUM_SAID]
        assert again.prompt_token_ids == request.prompt_token_ids
        assert again.sampling == request.sampling


async def record_end(world: World, req_id: str, tokens: list[int], reason: str) -> None:
    """Let Redis know of an end with these tokens."""
    keys = world.bus.keys
    fields = ("status", "finished", "finish_reason", reason, "num_output_tokens", len(tokens))
    data = token_ids(tokens).tobytes()
    await command(world.bus, "HSET", keys.request(req_id), *fields)
    await command(world.bus, "SET", keys.tokens(req_id), data)


async def test_a_record_that_goes_on_from_what_the_client_has_is_the_rest(world: World) -> None:
    engine = world.engine
    async with half_said(world) as request:
        engine.forget(request.req_id)
        await record_end(world, request.req_id, IDS, "length")
        await engine.send(request.gateway, row(request, NUM_SAID + 1, 5))
    assert not engine.resumes


async def test_a_record_that_contradicts_what_the_client_has_is_not_believed(world: World) -> None:
    engine = world.engine
    async with half_said(world) as request:
        engine.forget(request.req_id)
        await record_end(world, request.req_id, [5, *IDS[1:]], "length")
        await engine.send(request.gateway, row(request, NUM_SAID + 1, 5))
        await engine.wait_for(lambda: len(engine.requests) == 2)
        assert list(engine.requests[1].output_token_ids) == IDS[:NUM_SAID]


async def test_a_request_that_is_not_held_is_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.engine
    async with half_said(world) as request:
        monkeypatch.setattr(output_router, "SILENCE_S", 0.0)
        await engine.send(request.gateway, EngineCoreOutputs(held=token_ids()))
        await engine.wait_for(lambda: bool(engine.resumes))


async def test_a_request_that_is_lost_over_and_over_ends_with_an_error(world: World) -> None:
    engine = world.engine
    engine.script = saying([], finish_reason=None)
    answer = asyncio.ensure_future(world.complete("x", max_tokens=50))
    for number in range(1, MAX_RESUBMISSIONS + 2):
        await engine.wait_for(lambda n=number: len(engine.requests) == n)  # type: ignore[misc]  # mypy cannot infer the default
        request = engine.requests[-1]
        await engine.send(request.gateway, EngineCoreOutputs(unknown=[request.handle]))
    status, body = await answer
    assert (status, body["error"]["code"]) == (500, "internal")
    assert "lost" in body["error"]["message"]
    await engine.wait_for(lambda: len(engine.aborts) == 1)


async def test_a_record_that_nobody_can_read_costs_its_own_request_only(world: World) -> None:
    engine = world.engine
    engine.script = saying(IDS, finish_reason=None)
    answer = asyncio.ensure_future(world.complete("x", max_tokens=50))
    await engine.wait_for(lambda: len(engine.requests) == 1)
    [request] = engine.requests
    key = world.bus.keys.request(request.req_id)
    await command(world.bus, "SET", key, "no hash")
    await engine.send(request.gateway, row(request, 40, 5))
    assert (await answer)[0] == 500
    engine.script = saying(IDS)
    status, body = await world.complete("x", max_tokens=50)
    assert (status, body["choices"][0]["text"]) == (200, TEXT)
