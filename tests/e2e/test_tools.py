"""Calls that the demo model has to make, though nobody ever taught it to."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.fakes.running_stack import RunningStack

pytestmark = pytest.mark.e2e

WEATHER = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
SCHEMAS: dict[str, dict[str, Any]] = {"weather": WEATHER, "time": TIME}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="none")


def calls_of(client: openai.OpenAI, **options: Any) -> list[tuple[str, Any]]:
    """Names and arguments of what is called, whole; a stream says the same."""
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "How will the weather be in Bonn?"}],
        "tools": TOOLS,
        "max_tokens": 600,
        "temperature": 0,
        **options,
    }
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    calls: list[Any] = list(choice.message.tool_calls or ())
    with client.chat.completions.stream(**asked) as stream:
        [streamed] = stream.get_final_completion().choices
    again: list[Any] = list(streamed.message.tool_calls or ())
    found = [(one.function.name, one.function.arguments) for one in calls]
    assert [(one.function.name, one.function.arguments) for one in again] == found
    return [(name, json.loads(arguments)) for name, arguments in found]


def test_a_required_call_is_made_with_arguments_that_fit(client: openai.OpenAI) -> None:
    calls = calls_of(client, tool_choice="required", parallel_tool_calls=False)
    assert len(calls) == 1
    several = calls_of(client, tool_choice="required", temperature=1, seed=3)
    for name, arguments in [*calls, *several]:
        jsonschema.validate(arguments, SCHEMAS[name])


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    [(name, arguments)] = calls_of(client, tool_choice=named)
    assert name == "time"
    jsonschema.validate(arguments, TIME)


def test_the_demo_model_chooses_no_tools_by_itself(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        calls_of(client)
