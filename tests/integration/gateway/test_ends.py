"""How a generation ends: at a stop, or because its client left or is slow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gateway_world import (
    END,
    TOKENIZER,
    World,
    begin,
    ids_of,
    make_world,
    parse_events,
)
from tests.fakes.scripted_engine import saying
from tests.fakes.tokenizers import byte_level_tokenizer, write_model_folder
from wire.config import Settings

pytestmark = pytest.mark.redis


async def test_a_stop_token_is_reported_and_is_no_text(world: World) -> None:
    stop = ids_of("x")[0]
    world.engine.script = saying([*ids_of("hello"), stop], finish_reason="stop", stop_token_id=stop)
    _, body = await world.complete("a", stop_token_ids=[stop], max_tokens=50)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")
    assert choice["stop_reason"] == stop
    assert body["usage"]["completion_tokens"] == len(ids_of("hello")) + 1


async def test_the_end_of_sequence_is_a_stop_without_a_reason(world: World) -> None:
    world.engine.script = saying([*ids_of("hello"), END], finish_reason="stop")
    _, body = await world.chat(skip_special_tokens=False)
    [choice] = body["choices"]
    assert choice["message"]["content"] == "hello"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


STOPS = [
    ("two", "one ", 1),  # inside the text
    ("o th", "one tw", 1),  # across tokens
    ("one", "", 1),  # at the start
    ("five!", "one two three four ", 1),  # at the very end
]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("stop", "before", "_"), STOPS)
async def test_a_stop_string_ends_stream_and_body_alike(
    world: World, stop: str, before: str, include: bool, endpoint: str, _: int
) -> None:
    text = "one two three four five!"
    ids = ids_of(text)
    world.engine.script = saying(ids)
    body: dict[str, Any] = {"prompt": "x"}
    path = "/v1/completions"
    if endpoint == "chat":
        body, path = {"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"
    body |= {"stop": [stop], "include_stop_str_in_output": include, "max_tokens": len(ids)}
    expected = before + stop * include
    _, whole = await world.post(path, body)
    events = await world.events(path, body)
    [choice] = whole["choices"]
    found = choice["text"] if endpoint == "completions" else choice["message"]["content"]
    assert found == expected
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    choices = [event["choices"][0] for event in events[:-1]]
    texts = [c["text"] if endpoint == "completions" else c["delta"]["content"] for c in choices]
    assert "".join(texts) == expected
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    complete = next(n for n in range(len(ids) + 1) if stop in TOKENIZER.decode(ids[:n]))
    assert whole["usage"]["completion_tokens"] == complete


async def test_a_stop_string_ends_the_computation_at_its_token(world: World) -> None:
    ids = ids_of("one two three four five")
    world.engine.script = saying(ids + [7] * 500, finish_reason=None)
    _, body = await world.complete("x", stop="two", max_tokens=250)
    await world.engine.wait_for(lambda: bool(world.engine.aborts))
    [abort] = world.engine.aborts
    assert abort.req_id == world.engine.requests[0].req_id
    assert abort.reason == "stop"
    assert abort.num_output_tokens == body["usage"]["completion_tokens"]
    await world.engine.wait_for(lambda: world.engine.num_running == 0)


@pytest.mark.parametrize("tokens_per_commit", [1, 3, 100])
async def test_tokens_after_a_stop_string_are_nobodys(world: World, tokens_per_commit: int) -> None:
    ids = ids_of("one two three four five")
    world.engine.script = saying(ids)
    world.engine.tokens_per_commit = tokens_per_commit
    _, body = await world.complete("x", stop="two", max_tokens=50, return_token_ids=True)
    complete = next(n for n in range(len(ids)) if "two" in TOKENIZER.decode(ids[:n]))
    assert body["choices"][0]["text"] == "one "
    assert body["choices"][0]["token_ids"] == ids[:complete]
    assert body["usage"]["completion_tokens"] == complete


async def test_what_could_have_been_a_stop_string_is_sent_at_the_end(world: World) -> None:
    world.engine.script = saying(ids_of("one two"))
    events = await world.events(
        "/v1/completions", {"prompt": "x", "stop": "two!", "max_tokens": 50}
    )
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "one two"
    assert not world.engine.aborts


# ---------------------------------------------------------------- clients that leave or are slow


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["queued", "running"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_ends_its_requests(
    world: World, n: int, when: str, stream: bool, how: str
) -> None:
    engine = world.engine
    engine.script = saying(ids_of("hello world"), finish_reason=None)
    if when == "queued":
        engine.be_silent()
    writer = await begin(world, {"prompt": "x", "stream": stream, "n": n, "max_tokens": 100})
    await engine.wait_for(lambda: engine.num_running == n)
    if how == "reset":
        writer.transport.abort()
    writer.close()
    await engine.wait_for(lambda: len(engine.aborts) == n)
    assert {a.req_id for a in engine.aborts} == {r.req_id for r in engine.requests}
    assert {a.reason for a in engine.aborts} == {"abort"}
    await engine.wait_for(lambda: engine.num_running == 0)


async def test_a_request_that_ended_is_not_aborted(world: World) -> None:
    engine = world.engine
    await world.complete("hello", max_tokens=50)
    await world.events("/v1/completions", {"prompt": "hello"})
    engine.script = saying([], finish_reason=None)
    writer = await begin(world, {"prompt": "x"})
    await engine.wait_for(lambda: len(engine.requests) == 3)
    writer.close()
    await engine.wait_for(lambda: bool(engine.aborts))
    assert [abort.req_id for abort in engine.aborts] == [engine.requests[2].req_id]


async def test_a_slow_reader_gets_everything_in_fewer_pieces(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    """A client reads nothing until the engine has said it all; others are not held up."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["y" * 100_000])  # fills the sockets between the two
    long = tokenizer.get_vocab_size() - 1
    settings = make_settings(model=str(write_model_folder(tmp_path / "long", tokenizer)))
    async with make_world(settings) as world:
        engine = world.engine
        engine.script = saying([long, 5] * 100)
        body = {"prompt": "x", "max_tokens": 200, "stream": True}
        async with world.http.post(world.url + "/v1/completions", json=body) as response:
            await engine.wait_for(lambda: len(engine.requests) == 1 and engine.num_running == 0)
            engine.script = saying(ids_of("hello"))
            assert (await world.complete("x"))[1]["choices"][0]["text"] == "hello"
            events = parse_events(await response.text())
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == ("y" * 100_000 + tokenizer.decode([5])) * 100
    assert len(texts) < 150


async def test_a_stream_with_nothing_to_say_shows_that_it_lives(world: World) -> None:
    world.engine.be_silent()
    url = world.url + "/v1/completions"
    async with world.http.post(url, json={"prompt": "x", "stream": True}) as response:
        assert await response.content.readline() == b"\n"
        world.engine.talk()
        assert parse_events((await response.text()).lstrip("\n"))[-1] == "[DONE]"


async def test_a_client_that_strips_each_piece_of_a_stream_loses_no_event(world: World) -> None:
    """As load generators do: what is left of a piece is put before the next one."""
    world.engine.be_silent()
    url = world.url + "/v1/completions"
    async with world.http.post(url, json={"prompt": "x", "stream": True}) as response:
        pieces = [await response.content.readany() for _ in range(3)]  # that keep it alive
        world.engine.talk()
        pieces += [piece async for piece in response.content.iter_any()]
    assert b"".join(pieces[:3]).isspace()
    events = b"".join(piece.strip() + b"\n\n" for piece in pieces if piece.strip())
    assert parse_events(events.decode())[-1] == "[DONE]"
    assert len(parse_events(events.decode())) > 1
