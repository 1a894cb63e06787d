"""What a chat may say: its messages, tools and choices, and what is refused by place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.openai import ChatBody
from tests.fakes.bodies import MESSAGES, chat, refusal

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = {"type": "function", "function": {"name": "f"}}


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "user", "content": parts}])
    assert body.messages[0].content == "a\nb"
    one = chat(messages=[{"role": "user", "content": parts[:1]}])
    assert one.messages[0].content == "a"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages.0.role"),
        ({"role": "user"}, "messages.0.content"),
        ({"role": "user", "content": None}, "messages.0.content"),
        ({"role": "assistant", "content": None}, "messages.0.content"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": []}, "messages.0.content"),
        ({"role": "user", "content": ["x"]}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages.0.content",
        ),
        ({"content": "x"}, "messages.0.role"),
        ({"role": "user", "content": "x", "name": 5}, "messages.0.name"),
        (
            {"role": "assistant", "content": "x", "tool_calls": [{"id": "a"}]},
            "messages.0.tool_calls.0.function",
        ),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.0.tool_calls"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        ("hello", "messages.0"),
    ],
)
def test_a_message_that_is_none_is_refused_by_place(message: Any, param: str) -> None:
    error = refusal(json.dumps({"messages": [message]}).encode(), ChatBody)
    assert error.param == param


def test_messages_must_not_be_empty() -> None:
    assert refusal(b'{"messages": []}', ChatBody).param == "messages"
    assert refusal(b'{"messages": {}}', ChatBody).param == "messages"


def test_a_message_of_an_earlier_answer_may_come_back() -> None:
    earlier = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "function_call": None,
        "audio": None,
    }
    assert chat(messages=[*MESSAGES, earlier]).messages[1].for_template() == {
        "role": "assistant",
        "content": "x",
    }


def test_an_earlier_call_is_written_as_templates_know_it() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answer = {"role": "tool", "tool_call_id": "c", "content": "5"}
    body = chat(messages=[*MESSAGES, calls, answer])
    written = [message.for_template() for message in body.messages[1:]]
    function = {"name": "f", "arguments": {"a": 1}}
    assert written[0] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    assert written[1] == {"role": "tool", "content": "5", "tool_call_id": "c"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS},
            "tool_choice",
        ),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"tools": []}, "tools"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools.0.function.parameters",
        ),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
    ],
)
def test_a_choice_of_tools_that_is_none_is_refused(fields: dict[str, Any], param: str) -> None:
    error = refusal(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatBody)
    assert error.param is not None
    assert error.param.startswith(param)


def test_tools_may_be_there_and_not_be_chosen() -> None:
    assert chat(tools=TOOLS).chooses_tools
    assert chat(tools=TOOLS, tool_choice=NAMED).chooses_tools
    shape = {"response_format": {"type": "json_object"}}
    assert not chat(tools=TOOLS, tool_choice="none", **shape).chooses_tools
    assert not chat(tool_choice="none").chooses_tools


def test_earlier_reasoning_is_written_as_templates_know_it() -> None:
    for name in ("reasoning", "reasoning_content"):
        body = chat(messages=[{"role": "assistant", "content": "x", name: "hm"}])
        assert body.messages[0].for_template()["reasoning_content"] == "hm"


def test_a_developer_speaks_as_the_system() -> None:
    body = chat(messages=[{"role": "developer", "content": "x"}, *MESSAGES])
    assert body.messages[0].for_template() == {"role": "system", "content": "x"}


def test_the_last_message_is_continued_or_a_new_one_begun() -> None:
    assert chat(continue_final_message=True, add_generation_prompt=False)
    both = {"messages": MESSAGES, "continue_final_message": True}
    assert refusal(json.dumps(both).encode(), ChatBody).param == "continue_final_message"


def test_a_chat_says_whether_and_how_many() -> None:
    assert chat().num_logprobs is None
    assert chat(top_logprobs=0, logprobs=False).num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20
    for wrong in ({"top_logprobs": 1}, {"logprobs": True, "top_logprobs": 21}):
        error = refusal(json.dumps({"messages": MESSAGES, **wrong}).encode(), ChatBody)
        assert error.param == "top_logprobs"
    assert refusal(json.dumps({"messages": MESSAGES, "logprobs": 1}).encode(), ChatBody)
