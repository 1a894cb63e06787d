"""A client that comes back gets the rest, at any gateway; joined, it is the undisturbed stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gateway_pool import Listener, Pool, data_of, id_of, make_pool, tokens_for
from tests.fakes.gateway_world import TOKENIZER
from tests.fakes.scheduler_pool import eventually
from wire.config import Settings
from wire.messages import AbortRequest

pytestmark = pytest.mark.redis

PROMPT = [5, 6, 7]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "seed": 1, "ignore_eos": True}
RESUMABLE = {"X-Resumable": "1"}
CHAT = "/v1/chat/completions"


@pytest.fixture
async def pool(make_settings: Callable[..., Settings], oracle_folder: Path) -> AsyncIterator[Pool]:
    async with make_pool(make_settings(model=str(oracle_folder)), step_s=0.004) as made:
        yield made


async def heard(pool: Pool, body: dict[str, Any], **options: Any) -> Listener:
    """A whole resumable stream."""
    listener = Listener(pool.http, body, {**RESUMABLE, **options.pop("headers", {})}, **options)
    await listener.listen(pool.urls[0])
    assert listener.status == 200
    return listener


async def rest(pool: Pool, req_id: str, last_id: str | None, **headers: str) -> tuple[int, str]:
    """What the other gateway says to a client that comes back, but for what keeps it alive."""
    if last_id is not None:
        headers["Last-Event-ID"] = last_id
    url = f"{pool.urls[1]}/v1/streams/{req_id}"
    async with pool.http.get(url, headers=headers) as response:
        blocks = (await response.text()).split("\n\n")[:-1]
        return response.status, "".join(f"{b}\n\n" for b in blocks if b)


# ---------------------------------------------------------------- events and their ids


async def test_every_token_is_an_event_with_an_id(pool: Pool) -> None:
    body = {**BODY, "return_token_ids": True, "stream_options": {"include_usage": True}}
    listener = await heard(pool, body)
    r = listener.req_id
    ids = [f"{r}/{count}" for count in range(13)] + [f"{r}/12/1", f"{r}/12/2"]
    assert [id_of(block) for block in listener.blocks] == ids
    opening, *chunks, usage, done = listener.chunks
    assert opening["choices"][0]["prompt_token_ids"] == PROMPT
    assert [c["choices"][0]["token_ids"] for c in chunks] == [[t] for t in tokens_for(BODY)]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 11 + ["length"]
    assert usage["usage"]["completion_tokens"] == 12
    assert usage["id"] == f"cmpl-{r}"
    assert done == "[DONE]"


async def test_a_stream_that_nobody_may_come_back_to_has_no_ids(pool: Pool) -> None:
    plain = Listener(pool.http, BODY)
    await plain.listen(pool.urls[0])
    assert all(block.startswith("data: ") for block in plain.blocks)
    req_id = plain.chunks[0]["id"].removeprefix("cmpl-")
    assert (await rest(pool, req_id, None))[0] == 404


STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", BODY),
    "usage": ("/v1/completions", {**BODY, "stream_options": {"include_usage": True}}),
    "running usage": (
        "/v1/completions",
        {**BODY, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "echo": ("/v1/completions", {**BODY, "echo": True, "return_token_ids": True}),
    "logprobs": ("/v1/completions", {**BODY, "logprobs": 3}),
    "chat logprobs": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 12,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    "chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 12,
            "seed": 3,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
}


@pytest.mark.parametrize("kind", STREAMS)
async def test_behind_any_event_comes_exactly_the_rest(pool: Pool, kind: str) -> None:
    path, body = STREAMS[kind]
    listener = await heard(pool, body, path=path)
    blocks = listener.blocks
    for count in range(1, len(blocks)):
        expected = 200, "".join(blocks[count:])
        assert await rest(pool, listener.req_id, id_of(blocks[count - 1])) == expected
    assert await rest(pool, listener.req_id, None) == (200, "".join(blocks))
    assert (await rest(pool, listener.req_id, id_of(blocks[-1])))[0] == 204


async def test_several_choices_go_on_each_from_its_own_event(pool: Pool) -> None:
    path, body = STREAMS["chat"]
    body = {**body, "n": 3}
    listener = await heard(pool, body, path=path)

    def by_choice(blocks: list[str]) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        for chunk in map(data_of, blocks):
            if chunk != "[DONE]" and chunk["choices"]:
                found.setdefault(chunk["choices"][0]["index"], []).append(chunk)
        return found

    whole = by_choice(listener.blocks)
    assert {index: len(chunks) for index, chunks in whole.items()} == {0: 13, 1: 13, 2: 13}
    for count in range(1, len(listener.blocks)):
        had = listener.blocks[:count]
        status, text = await rest(pool, listener.req_id, id_of(had[-1]))
        got = [f"{block}\n\n" for block in text.split("\n\n")[:-1]]
        assert status == 200
        assert by_choice([*had, *got]) == whole
        assert len(had) + len(got) == len(listener.blocks)
        assert got[-1] == listener.blocks[-1]


async def test_text_is_cut_at_the_same_place_wherever_it_is_read(pool: Pool) -> None:
    """A stop string across tokens, the beginning of another, half a character at the end."""
    text = TOKENIZER.decode(tokens_for(BODY), skip_special_tokens=True)
    assert len(text) > 6
    for stop in ([text[3:6]], [text[-1] + "never"], [text[-3:]]):
        listener = await heard(pool, {**BODY, "stop": stop, "include_stop_str_in_output": True})
        for count in range(1, len(listener.blocks)):
            _, said = await rest(pool, listener.req_id, id_of(listener.blocks[count - 1]))
            assert said == "".join(listener.blocks[count:])


# ---------------------------------------------------------------- connections that break


async def test_a_stream_goes_on_at_another_gateway_while_it_is_generated(pool: Pool) -> None:
    body = {**BODY, "max_tokens": 150, "stream_options": {"include_usage": True}}
    whole = await heard(pool, body)
    client = Listener(pool.http, body, RESUMABLE)
    for at, num_events in enumerate((1, 30, 31, 90)):
        listen = client.listen if not at else client.listen_again
        listening = asyncio.ensure_future(listen(pool.urls[at % 2]))
        await client.has(num_events)
        listening.cancel()
        await asyncio.wait([listening])
    await client.listen_again(pool.urls[0])
    assert client.said == whole.said


async def test_two_may_read_one_stream_at_one_gateway(pool: Pool) -> None:
    body = {**BODY, "max_tokens": 100}
    first = Listener(pool.http, body, {"Idempotency-Key": "k"})
    second = Listener(pool.http, body, {"Idempotency-Key": "k"})
    async with asyncio.TaskGroup() as group:
        group.create_task(first.listen(pool.urls[0]))
        await first.has(20)
        group.create_task(second.listen(pool.urls[0]))
    assert first.blocks == second.blocks
    assert len(first.blocks) == 101
    assert await pool.num_requests() == 1


async def test_a_client_that_may_come_back_leaves_its_request_running(pool: Pool) -> None:
    body = {**BODY, "max_tokens": 400}
    plain, resumable = Listener(pool.http, body), Listener(pool.http, body, RESUMABLE)
    listening = [asyncio.ensure_future(one.listen(pool.urls[0])) for one in (plain, resumable)]
    await plain.has(3)
    await resumable.has(3)
    for one in listening:
        one.cancel()
    await asyncio.wait(listening)
    req_id = plain.chunks[0]["id"].removeprefix("cmpl-")
    await eventually(partial(pool.has_ended, req_id))
    known = await pool.bus.request(resumable.req_id)
    assert known["status"] == "running"
    await resumable.listen_again(pool.urls[1])
    assert len(resumable.blocks) == 401


# ---------------------------------------------------------------- keys


async def test_one_key_is_one_generation_wherever_it_is_sent(pool: Pool) -> None:
    first = await heard(pool, BODY, headers={"Idempotency-Key": "a key"})
    again = Listener(pool.http, BODY, {"Idempotency-Key": "a key"})
    await again.listen(pool.urls[1])
    assert again.blocks == first.blocks
    behind = Listener(
        pool.http, BODY, {"Idempotency-Key": "a key", "Last-Event-ID": id_of(first.blocks[4])}
    )
    await behind.listen(pool.urls[1])
    assert behind.blocks == first.blocks[5:]
    assert await pool.num_requests() == 1


async def test_a_body_is_given_again_or_waited_for(pool: Pool) -> None:
    body = {**BODY, "max_tokens": 60}
    answers = await asyncio.gather(
        *(pool.post(body, at=number % 2, Idempotency_Key="k") for number in range(8))
    )
    answers.append(await pool.post(body, at=1, Idempotency_Key="k"))
    assert [status for status, _ in answers] == [200] * 9
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][1]["usage"]["completion_tokens"] == 60
    assert await pool.num_requests() == 1


async def test_a_key_with_another_body_is_refused(pool: Pool) -> None:
    await pool.post(BODY, Idempotency_Key="k")
    for other in ({**BODY, "seed": 2}, {**BODY, "stream": True}):
        status, body = await pool.post(other, at=1, Idempotency_Key="k")
        assert (status, body["error"]["param"]) == (422, "Idempotency-Key")
    assert await pool.num_requests() == 1


async def test_keys_and_streams_belong_to_their_tenant(pool: Pool) -> None:
    mine = await heard(pool, BODY, headers={"Idempotency-Key": "k", "X-Tenant": "mine"})
    assert (await rest(pool, mine.req_id, None))[0] == 404
    assert (await rest(pool, mine.req_id, None, **{"X-Tenant": "other"}))[0] == 404
    assert (await rest(pool, mine.req_id, None, **{"X-Tenant": "mine"}))[0] == 200
    other = await heard(pool, {**BODY, "seed": 2}, headers={"Idempotency-Key": "k"})
    assert other.req_id != mine.req_id
    assert (await pool.bus.request(mine.req_id))["tenant"] == "mine"


async def test_what_was_aborted_may_be_tried_again_and_what_went_well_may_not(pool: Pool) -> None:
    body = {**BODY, "max_tokens": 2000}
    client = Listener(pool.http, body, {"Idempotency-Key": "k"})
    listening = asyncio.ensure_future(client.listen(pool.urls[0]))
    await client.has(5)
    await pool.bus.abort(AbortRequest(client.req_id))
    await listening
    assert client.chunks[-2]["choices"][0]["finish_reason"] == "abort"
    status, rest_of_it = await rest(pool, client.req_id, id_of(client.blocks[-3]))
    assert (status, rest_of_it) == (200, "".join(client.blocks[-2:]))
    again = Listener(pool.http, body, {"Idempotency-Key": "k"})
    listening = asyncio.ensure_future(again.listen(pool.urls[1]))
    await again.has(5)
    assert again.req_id != client.req_id
    assert again.chunks[0] | {"created": 0, "id": ""} == client.chunks[0] | {"created": 0, "id": ""}
    listening.cancel()
    await asyncio.wait([listening])


async def test_an_error_is_the_last_event_wherever_it_is_read(pool: Pool) -> None:
    body = {**BODY, "max_tokens": 2000, "deadline_ms": 400, "return_token_ids": True}
    client = Listener(pool.http, body, {"Idempotency-Key": "k"})
    await client.listen(pool.urls[0])
    *chunks, error, _ = client.chunks
    assert error["error"]["message"] == "the deadline has passed"
    assert chunks[-1]["choices"][0]["finish_reason"] is None
    for count in (1, len(chunks) - 1, len(chunks), len(chunks) + 1):
        told = await rest(pool, client.req_id, id_of(client.blocks[count - 1]))
        assert told == (200, "".join(client.blocks[count:]))
    status, _ = await rest(pool, client.req_id, None)
    assert status == 200
    again = Listener(pool.http, body, {"Idempotency-Key": "k"})
    await again.listen(pool.urls[1])
    assert again.req_id != client.req_id


async def test_a_refusal_comes_again_as_what_it_was(pool: Pool) -> None:
    body = {**BODY, "prompt": [5] * 2000}  # more than the worker has blocks for
    for at in (0, 1):
        status, said = await pool.post(body, at=at, Idempotency_Key="k")
        assert (status, said["error"]["type"]) == (400, "invalid_request_error")


# ---------------------------------------------------------------- what is refused


async def test_what_is_no_position_in_the_stream_is_refused(pool: Pool) -> None:
    listener = await heard(pool, BODY)
    r = listener.req_id
    for bad in ("x", r, f"{'0' * 32}/1", f"{r}/1,2", f"{r}/-1", f"{r}/1/x", f"{r}/²"):
        assert (await rest(pool, r, bad))[0] == 400, bad
    assert (await rest(pool, "0" * 32, None))[0] == 404


@pytest.mark.parametrize(
    ("name", "value"),
    [("Idempotency-Key", "é"), ("Idempotency-Key", "x" * 256), ("X-Resumable", "yes")],
)
async def test_a_bad_header_is_refused(pool: Pool, name: str, value: str) -> None:
    status, body = await pool.post(BODY, **{name: value})
    assert (status, body["error"]["param"]) == (400, name)


async def test_the_rest_of_what_is_gone_is_not_begun_anew(pool: Pool) -> None:
    status, _ = await pool.post(BODY, Idempotency_Key="new", Last_Event_ID="0/1")
    assert status == 404
    assert await pool.num_requests() == 0


async def test_what_is_known_of_an_answer_goes_with_it(
    make_settings: Callable[..., Settings], oracle_folder: Path
) -> None:
    """All choices are kept until the last has ended, and nothing is kept for ever."""
    settings = make_settings(model=str(oracle_folder), retention_s=0.3)
    async with make_pool(settings) as pool:
        body = {**BODY, "n": 2}
        first, _ = await pool.post(body, Idempotency_Key="k")
        assert first == 200

        async def is_forgotten() -> bool:
            return await pool.num_requests() == 0

        await eventually(is_forgotten)
        left = await pool.bus.read([("KEYS", "*:idem:*"), ("KEYS", "*:tok:*")])
        assert left == [[], []]
