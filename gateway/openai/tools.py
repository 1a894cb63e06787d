"""Tools as a chat has them: their descriptions, the choice among them, and earlier calls."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from gateway.openai.body import Body, wrong

MAX_TOOLS = 128

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    """What can be called."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A function, which is the only kind of tool."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """One function of those that are described."""

    name: Name


class NamedChoice(Body):
    """The model has to call this function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def _arguments(value: Any) -> dict[str, Any]:
    """Arguments of an earlier call, which are JSON in a string; an empty one is none."""
    if type(value) is dict:
        return value
    if type(value) is not str:
        raise wrong("must be a string with a JSON object")
    try:
        arguments = json.loads(value or "{}")
    except (ValueError, RecursionError):
        raise wrong("must be a string with a JSON object") from None
    if not isinstance(arguments, dict):
        raise wrong("must be a string with a JSON object")
    return arguments


Arguments = Annotated[dict[str, Any], PlainValidator(_arguments, json_schema_input_type=str)]


class FunctionCall(Body):
    """What was called, and with what."""

    name: Annotated[str, Field(min_length=1)]
    arguments: Arguments = Field(default_factory=dict)


class ToolCall(Body):
    """A call that the model has made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
