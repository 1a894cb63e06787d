"""Log-probabilities line up with their tokens: whole, as a stream, and for the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.app_keys import READINESS
from tests.fakes.fake_logprobs import logprob_of, top_of
from tests.fakes.gateway_world import END, TOKENIZER, World, ids_of
from tests.fakes.scripted_engine import LOGPROBS_VOCAB, Script, saying

pytestmark = pytest.mark.redis

LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


def name(token: int) -> str:
    text: str = TOKENIZER.decode([token], skip_special_tokens=False)
    return text


async def test_a_chat_has_an_entry_a_token(world: World) -> None:
    ids = [*ids_of("hello world"), END]
    world.engine.script = saying(ids, finish_reason="stop")
    _, body = await world.chat("hi", logprobs=True, top_logprobs=2)
    [choice] = body["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [logprob_of(token) for token in ids]
    assert [entry["token"] for entry in content] == [name(token) for token in ids]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    for token, entry in zip(ids, content, strict=True):
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert values == [logprob for _, logprob in top_of(token, 2, LOGPROBS_VOCAB)]
    joined = bytes(byte for entry in content for byte in entry["bytes"])
    assert joined.decode() == choice["message"]["content"] == "hello world"
    assert content[-1]["bytes"] == []


async def test_a_stream_has_the_same_entries_however_it_is_cut(world: World) -> None:
    vocabulary = world.app[READINESS].model.tokenizer.vocabulary
    single = {p[0]: i for i, p in enumerate(vocabulary.pieces) if len(p) == 1}
    ids = [*ids_of("hello"), *(single[byte] for byte in " 👍🏽 so STOP it".encode())]
    world.engine.script = saying(ids)
    for tokens_per_commit in (1, 3, 100):
        world.engine.tokens_per_commit = tokens_per_commit
        body = {"prompt": "x", "logprobs": 1, "max_tokens": 200, "stop": ["STOP"]}
        events = await world.events("/v1/completions", body)
        streamed: dict[str, list[Any]] = {one: [] for one in LISTS}
        for event in events[:-1]:
            for one in LISTS:
                streamed[one] += event["choices"][0]["logprobs"][one]
        _, whole = await world.post("/v1/completions", body)
        assert whole["choices"][0]["logprobs"] == streamed
        assert len(streamed["tokens"]) == whole["usage"]["completion_tokens"]
        chat = {
            "messages": [{"role": "user", "content": "x"}],
            "logprobs": True,
            "stop": ["STOP"],
        }
        events = await world.events("/v1/chat/completions", chat)
        entries = [
            entry for event in events[1:-1] for entry in event["choices"][0]["logprobs"]["content"]
        ]
        _, whole = await world.post("/v1/chat/completions", chat)
        assert whole["choices"][0]["logprobs"]["content"] == entries
        assert len(entries) == whole["usage"]["completion_tokens"]


async def test_offsets_point_into_the_text(world: World) -> None:
    ids = [*ids_of("hello 你好 world"), END]
    world.engine.script = saying(ids, finish_reason="stop")
    _, body = await world.complete("say", echo=True, logprobs=0, max_tokens=50)
    [choice] = body["choices"]
    lists = choice["logprobs"]
    assert {len(lists[one]) for one in LISTS} == {len(ids_of("say")) + len(ids)}
    for offset, token in zip(lists["text_offset"], [*ids_of("say"), *ids], strict=True):
        piece = "" if token == END else name(token)
        if "\ufffd" not in piece:
            assert choice["text"][offset : offset + len(piece)] == piece


async def test_the_token_itself_is_always_there_and_spelled_apart(world: World) -> None:
    vocabulary = world.app[READINESS].model.tokenizer.vocabulary
    single = {p[0]: i for i, p in enumerate(vocabulary.pieces) if len(p) == 1}
    world.engine.script = saying([single[0xF0]])
    for num_top in (0, 1, 5, 20):
        _, body = await world.complete("x", logprobs=num_top, max_tokens=1)
        lists = body["choices"][0]["logprobs"]
        assert lists["tokens"] == ["bytes:\\xf0"]
        assert lists["top_logprobs"][0]["bytes:\\xf0"] == lists["token_logprobs"][0]
        assert len(lists["top_logprobs"][0]) == num_top + 1
    _, body = await world.complete("x", logprobs=1, max_tokens=1, return_tokens_as_token_ids=True)
    assert body["choices"][0]["logprobs"]["tokens"] == [f"token_id:{single[0xF0]}"]


async def test_prompt_logprobs_are_those_of_vllm(world: World) -> None:
    prompt = ids_of("one two three")
    _, body = await world.complete("one two three", prompt_logprobs=2, max_tokens=1)
    first, *others = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(others) == len(prompt) - 1
    for token, entries in zip(prompt[1:], others, strict=True):
        own = entries[str(token)]
        assert (own["logprob"], own["decoded_token"]) == (logprob_of(token), name(token))
        assert own["rank"] == token % 5 + 1
        assert len(entries) == 3
    _, body = await world.chat("hello", prompt_logprobs=0)
    chat_prompt = world.engine.requests[-1].prompt_token_ids
    assert len(body["prompt_logprobs"]) == len(chat_prompt)


async def test_an_echo_without_output_is_scored(world: World) -> None:
    """How likely a text is, as evaluations ask: nothing is generated for it."""
    prompt = ids_of("one two three")
    world.engine.script = lambda _: Script(ids_of("never shown"))
    _, body = await world.complete("one two three", echo=True, logprobs=1, max_tokens=0)
    [choice] = body["choices"]
    assert choice["text"] == "one two three"
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    lists = choice["logprobs"]
    assert lists["token_logprobs"] == [None, *map(logprob_of, prompt[1:])]
    assert [len(alternatives) for alternatives in lists["top_logprobs"][1:]] == [2] * (
        len(prompt) - 1
    )


async def test_each_choice_of_each_prompt_has_its_own(world: World) -> None:
    world.engine.script = lambda request: Script(list(request.prompt_token_ids))
    prompts = ["one", "two three"]
    _, body = await world.complete(prompts, n=2, echo=True, logprobs=0, max_tokens=9)
    for choice in body["choices"]:
        ids = ids_of(prompts[choice["index"] // 2])
        own = [logprob_of(token) for token in ids]
        assert choice["logprobs"]["token_logprobs"] == [None, *own[1:], *own]


async def test_logprobs_that_got_lost_are_an_error_and_not_made_up(world: World) -> None:
    """The engine says tokens again without them, as after a loss."""
    world.engine.with_logprobs = False
    status, body = await world.complete("x", logprobs=1)
    assert status == 500
    assert "lost" in body["error"]["message"]
    assert (await world.complete("one two", prompt_logprobs=1))[0] == 500
    assert (await world.complete("x"))[0] == 200
