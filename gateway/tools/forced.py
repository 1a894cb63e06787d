"""Calls that have to be made: a grammar that allows nothing else, for any model.

With tool_choice "required" the output is a list of calls, `[{"name": "f", "arguments": {…}}, …]`;
with a named function it is that function's arguments. Where the chat template knows no tools, the
system message describes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gateway.openai.tools import Tool
from wire import grammars

MAX_CALLS = 8  # in one answer, so that it has an end


def required_calls(tools: Sequence[Tool], *, parallel: bool) -> str:
    """A grammar of one call or several. Raises GrammarError."""
    more = f'(", " call){{0,{MAX_CALLS - 1}}}' if parallel else ""
    rules = [
        f'start: "[" call {more} "]"',
        "call: " + " | ".join(map("c{}".format, range(len(tools)))),
    ]
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ')
        rules.append(f'c{number}: {head} a{number} "}}"')
        rules.append(f"a{number}: {grammars.json_rule(_parameters(tool))}")
    return grammars.of_grammar("\n".join(rules))


def named_call(tools: Sequence[Tool], name: str) -> str:
    """A grammar of the arguments of one function. Raises GrammarError."""
    tool = next(tool for tool in tools if tool.function.name == name)
    return grammars.of_json_schema(_parameters(tool))


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def described(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool], named: str | None
) -> list[dict[str, Any]]:
    """Write tools into the system message, and earlier calls into what the assistant said."""
    functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
    lines = [json.dumps(function, ensure_ascii=False) for function in functions]
    how = (
        'Answer with calls and nothing else: [{"name": …, "arguments": {…}}]'
        if named is None
        else f"Answer with the arguments of {named}, as a JSON object, and nothing else."
    )
    text = "\n".join(["These functions can be called:", *lines, how])
    told = [_with_calls_as_text(message) for message in messages]
    if told[0]["role"] == "system":
        return [{**told[0], "content": f"{told[0]['content']}\n\n{text}"}, *told[1:]]
    return [{"role": "system", "content": text}, *told]


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    text = json.dumps([call["function"] for call in calls], ensure_ascii=False)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": f"{message['content']}\n{text}".strip()}
