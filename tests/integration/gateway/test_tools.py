"""Calls of tools over HTTP: chosen by the model, or forced; whole and as a stream the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gateway_world import TOKENIZER, World, ids_of, make_world
from tests.fakes.scripted_engine import saying
from tests.fakes.tokenizers import CHAT_TEMPLATE, write_model_folder
from wire.config import Settings

pytestmark = pytest.mark.redis

CHAT = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a place",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    },
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
TEMPLATE = "{% if tools %}tools: {{ tools | tojson }} <tool_call>\n{% endif %}" + CHAT_TEMPLATE
SAID = {
    "hermes": 'Wait. <tool_call>{"name": "weather", "arguments": {"place": "Bonn"}}</tool_call>'
    '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"place": "Bonn"}};'
    '{"name": "time", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"place": "Bonn"}},'
    '{"name": "time", "arguments": {}}]',
    "pythonic": "[weather(place='Bonn'), time()]",
}


@pytest.fixture
def make(make_settings: Callable[..., Settings], tmp_path: Path) -> Callable[..., Any]:
    def made(template: str = TEMPLATE, **settings: Any) -> Any:
        folder = write_model_folder(
            tmp_path / "m",
            TOKENIZER,
            chat_template=template,
            config={"max_position_embeddings": 2048},
        )
        return make_world(make_settings(model=str(folder), max_queued_requests=8, **settings))

    return made


@pytest.fixture
async def hermes(make: Callable[..., Any]) -> AsyncIterator[World]:
    async with make() as world:
        yield world


@pytest.fixture
async def plain(make: Callable[..., Any]) -> AsyncIterator[World]:
    """A model whose chat template knows no tools."""
    async with make(CHAT_TEMPLATE) as world:
        yield world


def body_of(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}


def summary(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of a message's calls."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(one["name"], json.loads(one["arguments"])) for one in functions]


def gathered(events: list[Any]) -> tuple[dict[str, Any], str | None]:
    """The message that deltas add up to, as a client adds them up, and how it ended."""
    message: dict[str, Any] = {"content": None}
    reasons = []
    for event in events[:-1]:
        [choice] = event["choices"]
        delta = choice["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                calls.append({"function": {"arguments": ""}})
            else:
                assert call["index"] == len(calls) - 1
                assert set(call) == {"index", "function"}
            function = calls[-1]["function"]
            calls[-1].setdefault("id", call.get("id"))
            function.setdefault("name", call["function"].get("name"))
            function["arguments"] += call["function"]["arguments"]
        reasons += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
    [reason] = reasons
    return message, reason


@pytest.mark.parametrize("family", SAID)
@pytest.mark.parametrize("tokens_per_commit", [1, 3, 100])
async def test_a_model_calls_tools_in_the_words_of_its_family(
    make: Callable[..., Any], family: str, tokens_per_commit: int
) -> None:
    async with make(tool_call_parser=family) as world:
        world.engine.script = saying(ids_of(SAID[family]), finish_reason="stop")
        world.engine.tokens_per_commit = tokens_per_commit
        _, body = await world.post(CHAT, body_of())
        [choice] = body["choices"]
        message = choice["message"]
        assert summary(message) == [("weather", {"place": "Bonn"}), ("time", {})]
        assert message["content"] == ("Wait. " if family == "hermes" else None)
        assert choice["finish_reason"] == "tool_calls"
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == 2
        if family == "mistral":
            assert all(len(one) == 9 for one in ids)
        streamed, reason = gathered(await world.events(CHAT, body_of()))
        assert summary(streamed) == summary(message)
        assert (streamed["content"], reason) == (message["content"], "tool_calls")
        prompt = TOKENIZER.decode(list(world.engine.requests[0].prompt_token_ids))
        assert '"of a place"' in prompt


async def test_a_text_without_a_call_is_a_text(hermes: World) -> None:
    hermes.engine.script = saying(ids_of("hello <tool world"), finish_reason="stop")
    _, body = await hermes.post(CHAT, body_of())
    [choice] = body["choices"]
    assert choice["message"]["content"] == "hello <tool world"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    streamed, reason = gathered(await hermes.events(CHAT, body_of()))
    assert (streamed, reason) == ({"content": "hello <tool world"}, "stop")


async def test_one_call_at_a_time_if_asked(hermes: World) -> None:
    hermes.engine.script = saying(ids_of(SAID["hermes"]), finish_reason="stop")
    _, body = await hermes.post(CHAT, body_of(parallel_tool_calls=False))
    assert summary(body["choices"][0]["message"]) == [("weather", {"place": "Bonn"})]
    events = await hermes.events(CHAT, body_of(parallel_tool_calls=False))
    assert summary(gathered(events)[0]) == [("weather", {"place": "Bonn"})]


async def test_tools_that_may_not_be_chosen_are_not_there(hermes: World) -> None:
    hermes.engine.script = saying(ids_of(SAID["hermes"]), finish_reason="stop")
    _, body = await hermes.post(CHAT, body_of(tool_choice="none"))
    assert body["choices"][0]["message"]["content"] == SAID["hermes"]
    prompt = TOKENIZER.decode(list(hermes.engine.requests[0].prompt_token_ids))
    assert "weather" not in prompt


async def test_a_required_call_is_held_to_a_grammar(plain: World) -> None:
    """With a model whose template knows no tools: the system message tells of them."""
    said = (
        '[{"name": "weather", "arguments": {"place": "Bonn"}}, {"name": "time", "arguments": {}}]'
    )
    plain.engine.script = saying(ids_of(said), finish_reason="stop")
    _, body = await plain.post(CHAT, body_of(tool_choice="required", max_tokens=200))
    [choice] = body["choices"]
    assert summary(choice["message"]) == [("weather", {"place": "Bonn"}), ("time", {})]
    assert choice["finish_reason"] == "tool_calls"
    [request] = plain.engine.requests
    assert request.sampling.grammar is not None
    prompt = TOKENIZER.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>system\nThese functions can be called:")
    assert '"of a place"' in prompt
    events = await plain.events(CHAT, body_of(tool_choice="required", max_tokens=200))
    assert summary(gathered(events)[0]) == summary(choice["message"])


async def test_a_named_call_is_its_arguments(plain: World) -> None:
    plain.engine.script = saying(ids_of('{"place": "Bonn"}'), finish_reason="stop")
    _, body = await plain.post(CHAT, body_of(tool_choice=NAMED, max_tokens=200))
    [choice] = body["choices"]
    assert summary(choice["message"]) == [("weather", {"place": "Bonn"})]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    message, reason = gathered(await plain.events(CHAT, body_of(tool_choice=NAMED, max_tokens=99)))
    assert (summary(message), reason) == ([("weather", {"place": "Bonn"})], "tool_calls")


async def test_a_call_that_was_cut_short_says_so(hermes: World) -> None:
    hermes.engine.script = saying(ids_of(SAID["hermes"])[:-30])
    _, body = await hermes.post(CHAT, body_of())
    assert body["choices"][0]["finish_reason"] == "length"


async def test_what_a_model_cannot_do_is_refused(plain: World, make: Callable[..., Any]) -> None:
    for fields in ({}, {"tool_choice": "auto"}):
        status, body = await plain.post(CHAT, body_of(**fields))
        assert (status, body["error"]["param"]) == (400, "tool_choice")
    status, body = await plain.post(CHAT, {**body_of(), "tools": None, "reasoning_effort": "low"})
    assert (status, body["error"]["param"]) == (400, "reasoning_effort")
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "what"}}}]
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        status, body = await plain.post(CHAT, {**body_of(tool_choice=choice), "tools": bad})
        assert (status, body["error"]["param"]) == (400, "tools")
        assert "what" in body["error"]["message"]
    assert not plain.engine.requests
    async with make(tool_call_parser="none") as silent:
        assert (await silent.post(CHAT, body_of()))[0] == 400


async def test_reasoning_is_kept_apart(make: Callable[..., Any]) -> None:
    said = "<think>\nhm, the weather\n</think>\n\n" + SAID["hermes"]
    async with make(reasoning_parser="think") as world:
        world.engine.script = saying(ids_of(said), finish_reason="stop")
        _, body = await world.post(CHAT, body_of())
        message = body["choices"][0]["message"]
        assert message["reasoning_content"] == message["reasoning"] == "hm, the weather\n"
        assert message["content"] == "Wait. "
        assert len(summary(message)) == 2
        streamed, _ = gathered(await world.events(CHAT, body_of()))
        assert streamed["reasoning_content"] == message["reasoning_content"]
        assert (streamed["content"], summary(streamed)) == (message["content"], summary(message))
        _, body = await world.post(CHAT, body_of(include_reasoning=False))
        assert "reasoning" not in body["choices"][0]["message"]


async def test_the_openai_client_reads_calls(hermes: World) -> None:
    hermes.engine.script = saying(ids_of(SAID["hermes"]), finish_reason="stop")
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    asked: dict[str, Any] = {"model": hermes.settings.model_name, "tools": TOOLS}
    async with hermes.openai() as client:
        chat = await client.chat.completions.create(messages=messages, **asked)
        calls: list[Any] = list(chat.choices[0].message.tool_calls or ())
        assert [call.function.name for call in calls] == ["weather", "time"]
        async with client.chat.completions.stream(messages=messages, **asked) as stream:
            final = await stream.get_final_completion()
        streamed: list[Any] = list(final.choices[0].message.tool_calls or ())
        assert [call.function.arguments for call in streamed] == ['{"place": "Bonn"}', "{}"]
        messages.append(chat.choices[0].message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": one.id, "content": "5"} for one in calls]
        again = await client.chat.completions.create(messages=messages, **asked)
        assert again.choices[0].finish_reason == "tool_calls"
