"""Grammars that an output is held to: how one is compiled, and within what limits. Needs no torch.

The gateway compiles a grammar to see whether it is one, and the worker to follow it, both by this
module, so that what the one has accepted the other can do. The only importer of llguidance, whose
text form of a grammar is what travels (github.com/guidance-ai/llguidance; the method is that of
Koo, Liu and He 2024, arXiv:2407.08103, with an Earley parser over derivatives of expressions).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # about 20 ms to read the expressions of a grammar
    step_lexer_fuel=200_000,  # about 15 ms for the tokens that may come next
    step_max_items=50_000,
    max_lexer_states=20_000,  # about 40 MB
    max_grammar_size=100_000,
    verbose_errors=False,
)
_JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As Python writes JSON: with free whitespace a small model may say nothing else for ever."""


class GrammarError(ValueError):
    """A grammar that is none, or that costs too much; the text says why."""


def of_json_schema(schema: dict[str, Any] | str) -> str:
    """A grammar of the JSON that a schema allows. Raises GrammarError if it is no JSON object."""
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE)
    except ValueError as error:
        raise GrammarError(str(error)) from None


def json_rule(schema: dict[str, Any]) -> str:
    """The same as a part of a Lark grammar, with definitions of its own."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}"


def of_regex(expression: str) -> str:
    """A grammar of the texts that an expression matches as a whole."""
    return LLMatcher.grammar_from_regex(expression)


def of_choice(texts: Iterable[str]) -> str:
    """A grammar of some texts."""
    alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return LLMatcher.grammar_from_lark(f"start: {alternatives}")


def of_grammar(text: str) -> str:
    """A grammar in the syntax of Lark or GBNF. Raises GrammarError if it cannot be told which."""
    try:
        return grammar_from("grammar", text)
    except Exception as error:  # the reader of GBNF raises bare ones
        raise GrammarError(str(error)[:500]) from None


class GrammarTokenizer:
    """The tokens of a model as grammars see them. Takes a second to read."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Read a model folder; `eos_token_ids` end an output. Raises GrammarError if it cannot."""
        try:
            self._tokenizer = LLTokenizer(
                str(folder / "tokenizer.json"), n_vocab=vocab_size, eos_token=list(eos_token_ids)
            )
        except Exception as error:  # the library raises bare ones
            raise GrammarError(f"the tokenizer cannot be read: {error}") from None

    def compile(self, grammar: str) -> LLMatcher:
        """Be at the beginning of a grammar. Raises GrammarError if there is none.

        What may come first is worked out as well: it shows a grammar that allows nothing.
        """
        matcher = LLMatcher(self._tokenizer, grammar, limits=_LIMITS, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(reason_of(matcher))
        return matcher


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher cannot go on."""
    text = matcher.get_error().partition("<non-verbose/>")[0].strip()
    return (text if text != "NoExtensionBias" else "it allows nothing")[:500]
