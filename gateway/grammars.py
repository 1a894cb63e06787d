"""Structured output at the edge: what a request asks for becomes a grammar, and a bad one a 400.

A grammar is compiled here, off the event loop and within limits, just as the worker will do it. So
whoever gets a stream has a grammar that works.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.errors import invalid, too_busy
from gateway.openai import GenerationBody, StructuredOutputs
from gateway.openai.structured import MAX_GRAMMAR_LENGTH, MAX_SCHEMA_DEPTH
from wire import grammars
from wire.grammars import GrammarError, GrammarTokenizer

MAX_JOBS = 64  # grammars that are checked or wait for it
NUM_KNOWN = 256  # good grammars that are remembered


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


class GrammarChecker:
    """Tells good grammars from bad ones, on a thread of its own; remembers the good ones."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_args = folder, vocab_size, eos_token_ids
        self._tokenizer: GrammarTokenizer | None = None  # read with the first grammar
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._num_jobs = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()  # digests

    async def check(self, asked: AskedGrammar) -> None:
        """Raises ApiError if this is no grammar of something, or one that costs too much."""
        grammar = asked.text
        if len(grammar) > 2 * MAX_GRAMMAR_LENGTH:
            raise invalid(f"{asked.param}: {len(grammar)} characters are too many", asked.param)
        digest = hashlib.sha256(grammar.encode()).digest()
        if digest in self._known:
            self._known.move_to_end(digest)
            return
        if self._num_jobs >= MAX_JOBS:
            raise too_busy("too many grammars wait to be checked")
        self._num_jobs += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, grammar)
        except GrammarError as error:
            raise _bad(error, asked.param) from None
        finally:
            self._num_jobs -= 1
        self._known[digest] = None
        if len(self._known) > NUM_KNOWN:
            self._known.popitem(last=False)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> None:
        if self._tokenizer is None:
            self._tokenizer = GrammarTokenizer(*self._tokenizer_args)
        self._tokenizer.compile(grammar)
