"""`POST /v1/responses`: what a chat says, as items and as events; nothing is stored."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gateway_pool import Listener, Pool, id_of, make_pool
from tests.fakes.gateway_world import TOKENIZER, World, ids_of, make_world
from tests.fakes.response_stream import read_all
from tests.fakes.scripted_engine import saying
from tests.fakes.tokenizers import CHAT_TEMPLATE, write_model_folder
from wire.config import Settings

pytestmark = pytest.mark.redis

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
TEMPLATE = "{% if tools %}tools: {{ tools | tojson }} <tool_call>\n{% endif %}" + CHAT_TEMPLATE
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Bonn"}}</tool_call>'


@pytest.fixture
async def thinker(make_settings: Callable[..., Settings], tmp_path: Path) -> AsyncIterator[World]:
    """A model that thinks, and calls tools."""
    config = {"max_position_embeddings": 2048}
    folder = write_model_folder(tmp_path / "m", TOKENIZER, chat_template=TEMPLATE, config=config)
    settings = make_settings(model=str(folder), reasoning_parser="think")
    async with make_world(settings) as world:
        yield world


async def events_of(world: World, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events; each is named after its type."""
    async with world.http.post(world.url + PATH, json={**body, "stream": True}) as got:
        assert got.status == 200, await got.text()
        events = []
        for block in filter(None, (await got.text()).split("\n\n")):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def neutral(response: dict[str, Any]) -> Any:
    """Without what differs between two equal requests."""
    text = json.dumps({**response, "created_at": 0, "usage": None})
    read = json.loads(text.replace(response["id"].removeprefix("resp_"), "R"))
    return read["output"], read["status"]


async def test_a_text_is_answered_with_a_message(world: World) -> None:
    world.engine.script = saying(ids_of("hello world"), finish_reason="stop", num_cached_tokens=2)
    status, body = await world.post(PATH, {"input": "hi", "instructions": "be brief"})
    assert status == 200
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    assert body["id"].startswith("resp_")
    [message] = body["output"]
    assert (message["type"], message["role"], message["status"]) == (
        *("message", "assistant", "completed"),
    )
    [part] = message["content"]
    assert (part["type"], part["text"], part["annotations"]) == ("output_text", "hello world", [])
    prompt = list(world.engine.requests[0].prompt_token_ids)
    assert "be brief" in TOKENIZER.decode(prompt)
    num_said = len(ids_of("hello world"))
    assert body["usage"] == {
        "input_tokens": len(prompt),
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": num_said,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + num_said,
    }
    assert (body["store"], body["instructions"]) == (False, "be brief")
    assert (body["temperature"], body["tool_choice"]) == (1.0, "auto")


@pytest.mark.parametrize("tokens_per_commit", [1, 3, 100])
async def test_the_events_say_the_same(world: World, tokens_per_commit: int) -> None:
    world.engine.script = saying(ids_of("hello 👍🏽 world"))
    world.engine.tokens_per_commit = tokens_per_commit
    asked = {"input": "hi", "max_output_tokens": 12, "include": ["message.output_text.logprobs"]}
    asked["top_logprobs"] = 2
    _, whole = await world.post(PATH, asked)
    assert (whole["status"], whole["incomplete_details"]) == (
        *("incomplete", {"reason": "max_output_tokens"}),
    )
    [message] = whole["output"]
    logprobs = message["content"][0]["logprobs"]
    assert len(logprobs) == whole["usage"]["output_tokens"]
    assert all(len(one["top_logprobs"]) == 2 for one in logprobs)
    events = await events_of(world, asked)
    assert events[-1]["type"] == "response.incomplete"
    assert neutral(read_all(events)) == neutral(whole)


async def test_items_are_the_chat_that_they_mean(thinker: World) -> None:
    """What an assistant thought, said and called in one go is one message of the template."""
    thinker.engine.script = saying(ids_of("fine"), finish_reason="stop")
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "wait", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "wait", "reasoning": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    for path, body in ((PATH, {"input": items}), (CHAT, {"messages": messages})):
        status, told = await thinker.post(path, body)
        assert status == 200, told
    one, other = thinker.engine.requests
    assert one.prompt_token_ids == other.prompt_token_ids


@pytest.mark.parametrize("tokens_per_commit", [1, 3, 100])
async def test_reasoning_messages_and_calls_are_items(
    thinker: World, tokens_per_commit: int
) -> None:
    said = f"<think>\nhm</think>Wait. {CALL}"
    thinker.engine.script = saying(ids_of(said), finish_reason="stop")
    thinker.engine.tokens_per_commit = tokens_per_commit
    asked = {"input": "hi", "tools": [WEATHER]}
    _, body = await thinker.post(PATH, asked)
    reasoning, message, call = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "Wait. "
    assert (call["type"], call["name"], call["arguments"]) == (
        *("function_call", "weather", '{"place": "Bonn"}'),
    )
    assert call["call_id"].startswith("call_")
    num_thought = len(ids_of("<think>\nhm</think>"))
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": num_thought}
    assert neutral_calls(read_all(await events_of(thinker, asked))) == neutral_calls(body)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    _, told = await thinker.post(CHAT, chat)
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}


def neutral_calls(response: dict[str, Any]) -> Any:
    """Ids of calls depend on the request's."""
    return [{**item, "id": None, "call_id": None} for item in response["output"]]


async def test_forced_calls_are_items(thinker: World) -> None:
    for choice, said in {
        "required": '[{"name": "weather", "arguments": {"place": "Bonn"}}]',
        "named": '{"place": "Bonn"}',
    }.items():
        thinker.engine.script = saying(ids_of(said), finish_reason="stop")
        named = {"type": "function", "name": "weather"}
        asked = {"input": "hi", "tools": [WEATHER]}
        asked["tool_choice"] = choice if choice == "required" else named
        _, body = await thinker.post(PATH, asked)
        [call] = body["output"]
        assert (call["name"], json.loads(call["arguments"])) == ("weather", {"place": "Bonn"})
        assert body["tool_choice"] == asked["tool_choice"]
        assert thinker.engine.requests[-1].sampling.grammar is not None


async def test_a_format_holds_the_output_to_a_grammar(world: World) -> None:
    world.engine.script = saying(ids_of('{"a": 1}'), finish_reason="stop")
    shape = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    _, body = await world.post(PATH, {"input": "hi", "text": {"format": shape}})
    assert body["text"]["format"]["schema"] == {"type": "object"}
    asked = {"messages": [{"role": "user", "content": "hi"}], "response_format": None}
    asked["response_format"] = {"type": "json_schema", "json_schema": shape}
    await world.post(CHAT, asked)
    one, other = world.engine.requests
    assert one.sampling.grammar == other.sampling.grammar is not None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a store": ({"store": True}, "store"),
    "what came before": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "later": ({"background": True}, "background"),
    "a long text": ({"input": "word " * 5000}, "input"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input.0.content",
    ),
    "an item of another kind": ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
    "half a call": ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
    "a bad schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "what"}}}},
        "text.format",
    ),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    "too many tokens": ({"max_output_tokens": 10**6}, "max_output_tokens"),
    "tools of others": ({"tools": [{"type": "web_search", "name": "x"}]}, "tools.0.type"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "effort": ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    "truncation": ({"truncation": "auto"}, "truncation"),
    "a padded stream": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_done_is_refused_by_its_own_name(world: World, case: str) -> None:
    fields, param = REFUSED[case]
    status, body = await world.post(PATH, {"input": "hi", **fields})
    assert (status, body["error"]["param"]) == (400, param), body
    assert body["error"]["message"].startswith(param)
    assert not world.engine.requests


async def test_a_failure_after_the_start_is_an_event(world: World) -> None:
    world.engine.script = saying(ids_of("hello"), finish_reason="error", error="it broke")
    events = await events_of(world, {"input": "hi"})
    *_, error, failed = events
    assert (error["type"], error["message"]) == ("error", "it broke")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["message"] == "it broke"
    status, body = await world.post(PATH, {"input": "hi"})
    assert (status, body["error"]["message"]) == (500, "it broke")


async def test_a_stream_can_be_taken_up_again_elsewhere(
    make_settings: Callable[..., Settings], oracle_folder: Path
) -> None:
    settings = make_settings(model=str(oracle_folder), served_model_name="oracle")
    async with make_pool(settings, step_s=0.01) as pool:
        asked = {"input": "hi", "max_output_tokens": 40, "seed": 3, "ignore_eos": True}
        whole = await listened(pool, asked)
        first = Listener(pool.http, asked, {"X-Resumable": "1"}, PATH)
        await first.listen(pool.urls[0])
        cut = [place for place, block in enumerate(first.blocks) if id_of(block)][15]
        again = Listener(pool.http, asked, path=PATH, blocks=first.blocks[: cut + 1])
        await again.listen_again(pool.urls[1])
        for one, other in zip(again.blocks, first.blocks, strict=True):
            assert one == other
        told = [json.loads(block.rpartition("data: ")[2]) for block in again.blocks]
        assert neutral(read_all(told)) == neutral(whole)


async def listened(pool: Pool, asked: dict[str, Any]) -> dict[str, Any]:
    status, body = await pool.post(asked, PATH)
    assert status == 200
    found: dict[str, Any] = body
    return found
