"""Structured output at the edge: what a request asks for becomes a grammar, and a bad one a 400.

Whether one can be compiled, and at what cost, is `gateway.grammar_checker`'s to say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gateway.errors import invalid
from gateway.openai import GenerationBody, StructuredOutputs
from gateway.openai.structured import MAX_GRAMMAR_LENGTH, MAX_SCHEMA_DEPTH
from wire import grammars
from wire.grammars import GrammarError


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """What an output is held to, and the field that asks for it."""

    text: str
    param: str


def grammar_of(body: GenerationBody) -> AskedGrammar | None:
    """The grammar that a request asks for; None if any text will do. Raises ApiError."""
    shape, response = body.structured_outputs, body.response_format
    if shape is not None:
        return AskedGrammar(_of_structured_outputs(shape), "structured_outputs")
    if response is None or response.type == "text":
        return None
    if response.json_schema is None or response.type == "json_object":
        text = grammars.of_json_schema({"type": "object"})
    else:
        text = _of_schema(response.json_schema.given, "response_format.json_schema.schema")
    return AskedGrammar(text, "response_format")


def _of_structured_outputs(shape: StructuredOutputs) -> str:
    if shape.given_json is not None:
        return _of_schema(shape.given_json, "structured_outputs.json")
    if shape.regex is not None:
        return grammars.of_regex(shape.regex)
    if shape.choice is not None:
        return grammars.of_choice(shape.choice)
    if shape.grammar is None:
        return grammars.of_json_schema({"type": "object"})
    try:
        return grammars.of_grammar(shape.grammar)
    except GrammarError as error:
        raise _bad(error, "structured_outputs.grammar") from None


def _of_schema(given: dict[str, Any] | str, param: str) -> str:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(schema)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{param}: not JSON: {error}", param) from None
    if not isinstance(schema, dict):
        raise invalid(f"{param}: must be a JSON object", param)
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise invalid(
            f"{param}: {len(text)} characters; at most {MAX_GRAMMAR_LENGTH} are allowed", param
        )
    if (depth := _depth(schema)) > MAX_SCHEMA_DEPTH:
        raise invalid(
            f"{param}: it is {depth} levels deep; at most {MAX_SCHEMA_DEPTH} are allowed", param
        )
    try:
        return grammars.of_json_schema(schema)
    except GrammarError as error:
        raise _bad(error, param) from None


def _depth(value: Any) -> int:
    """Levels of objects and lists."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        level = [
            child for one in level for child in (one.values() if isinstance(one, dict) else one)
        ]
    return depth


def _bad(error: GrammarError, param: str) -> Exception:
    return invalid(f"{param}: {error}", param, code="invalid_grammar")
