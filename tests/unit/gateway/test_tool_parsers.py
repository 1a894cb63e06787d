"""Calls in the words of each family: found, streamed, and the same however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.tools import CallArguments, CallStart, Content, Parser, Part, Reasoning, make_parser
from gateway.tools.parsers import (
    PARSERS,
    ForcedCallsParser,
    NamedCallParser,
    family_of,
)
from gateway.tools.parts import joined
from gateway.tools.reasoning import ReasoningParser

CALL = '{"name": "f", "arguments": {"a": [1, "}"], "b": "\\"{"}}'
ARGUMENTS = '{"a": [1, "}"], "b": "\\"{"}'
TWO = [("f", ARGUMENTS), ("g", "{}")]


def read(parser: Parser, pieces: Sequence[str]) -> list[Part]:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined(parts + parser.finish())


def summary(parts: Sequence[Part]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and calls with their arguments."""
    content, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case Content(text):
                content += text
            case CallStart(name):
                calls.append((name, ""))
            case CallArguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case Reasoning():
                raise AssertionError("nobody reasons here")
    return content, calls


CASES: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "hermes one": ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", ARGUMENTS)]),
    "hermes two": (
        "hermes",
        f'Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{{"arguments": {{}}, '
        '"name": "g"}</tool_call>\n',
        "Let me see.\n",
        TWO,
    ),
    "hermes none": ("hermes", "5 < 6 <tool", "5 < 6 <tool", []),
    "hermes string": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    "hermes no call": ("hermes", "<tool_call>nothing", "<tool_call>nothing", []),
    "hermes nameless": ("hermes", '<tool_call>{"a": 1}', '<tool_call>{"a": 1}', []),
    "hermes cut": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1',
        "",
        [("f", '{"a": [1')],
    ),
    "hermes cut early": ("hermes", '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    "llama one": (
        "llama3_json",
        '{"name": "f", "parameters": ' + ARGUMENTS + "}",
        "",
        [("f", ARGUMENTS)],
    ),
    "llama two": (
        "llama3_json",
        f'<|python_tag|>{{"name": "f", "parameters": {ARGUMENTS}}}; '
        '{"name": "g", "parameters": {}}',
        "",
        TWO,
    ),
    "llama none": ("llama3_json", 'It is {"name": "f"}', 'It is {"name": "f"}', []),
    "llama object": ("llama3_json", '{"a": 1} it is', '{"a": 1} it is', []),
    "mistral list": (
        "mistral",
        f'Well.[TOOL_CALLS] [{CALL}, {{"name": "g", "arguments": {{}}}}]',
        "Well.",
        TWO,
    ),
    "mistral names": ("mistral", f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g{{}}", "", TWO),
    "mistral none": ("mistral", "a [TOOL] b [", "a [TOOL] b [", []),
    "pythonic": (
        "pythonic",
        "[f(a=[1, '}'], b='\"{'), g()]",
        "",
        [("f", '{"a": [1, "}"], "b": "\\"{"}'), ("g", "{}")],
    ),
    "pythonic marks": ("pythonic", "<|python_start|>[g()]<|python_end|>", "", [("g", "{}")]),
    "pythonic none": ("pythonic", "It is [1, 2]", "It is [1, 2]", []),
    "pythonic list": ("pythonic", "[1, 2]", "[1, 2]", []),
    "pythonic evil": ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found_however_the_text_is_cut(name: str) -> None:
    family, text, content, calls = CASES[name]
    expected = content, calls
    assert summary(read(make_parser(family), [text])) == expected
    assert summary(read(make_parser(family), list(text))) == expected
    draw = random.Random(name)
    for _ in range(30):
        cuts = sorted(draw.sample(range(len(text)), k=min(5, len(text) - 1)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert summary(read(make_parser(family), pieces)) == expected, pieces


_WORDS = [
    "<tool_call>", "</tool_call>", "{", "}", '"name": "f"', '"arguments": {}', ", ", "[TOOL_CALLS]",
    "[ARGS]", "[", "]", "f(a=1)", "x", "\n", ";", '"', "\\", "<|python_tag|>", "<", "é", "null",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(_WORDS), max_size=12))
def test_any_text_reads_the_same_in_pieces_and_as_a_whole(family: str, words: list[str]) -> None:
    whole = read(make_parser(family), ["".join(words)])
    assert read(make_parser(family), words) == whole
    assert read(make_parser(family), list("".join(words))) == whole


@pytest.mark.parametrize("family", PARSERS)
def test_plain_text_is_said_at_once(family: str) -> None:
    parser = make_parser(family)
    assert summary(parser.push("Hello, world"))[0] == "Hello, world"


def test_arguments_are_said_as_they_come() -> None:
    parser = make_parser("hermes")
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a": "on')
    assert parser.push("e tw") == [
        CallArguments("e"),
        CallArguments(" "),
        *map(CallArguments, "tw"),
    ]


def test_forced_calls_are_nothing_but_calls() -> None:
    text = f'[{CALL}, {{"name": "g", "arguments": {{}}}}]'
    for pieces in ([text], list(text)):
        assert summary(read(ForcedCallsParser(), pieces)) == ("", TWO)
    assert summary(read(ForcedCallsParser(), [text[:40]]))[0] == ""


def test_a_named_call_is_its_arguments() -> None:
    assert read(NamedCallParser("f"), ['{"a"', "", ": 1}"]) == [
        CallStart("f"),
        CallArguments('{"a": 1}'),
    ]
    assert read(NamedCallParser("f"), [""]) == []


THOUGHTS: list[tuple[str, bool, list[Part]]] = [
    ("<think>\nhm\n</think>\n\nYes", False, [Reasoning("hm\n"), Content("Yes")]),
    ("hm</think>Yes", True, [Reasoning("hm"), Content("Yes")]),
    ("\n <think>hm", False, [Reasoning("hm")]),
    ("Yes <think>no", False, [Content("Yes <think>no")]),
    ("<thi", False, [Content("<thi")]),
    ("hm</thi", True, [Reasoning("hm</thi")]),
    ("", False, []),
    ("<think></think>x", False, [Content("x")]),
]


@pytest.mark.parametrize(("text", "is_open", "expected"), THOUGHTS)
def test_reasoning_is_kept_apart(text: str, is_open: bool, expected: list[Part]) -> None:
    for pieces in ([text], list(text)):
        assert read(ReasoningParser(None, is_open=is_open), pieces) == expected


def test_calls_come_behind_the_reasoning() -> None:
    text = f"<think>a <tool_call> b</think>\n<tool_call>{CALL}</tool_call>"
    for pieces in ([text], list(text)):
        parser = ReasoningParser(make_parser("hermes"), is_open=False)
        parts = read(parser, pieces)
        assert parts[0] == Reasoning("a <tool_call> b")
        assert summary(parts[1:]) == ("", [("f", ARGUMENTS)])


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS] [TOOL_CALLS]{% endif %}", "mistral"),
        ("{% if tools %}<|python_start|>{% endif %}", "pythonic"),
        ("{% if tools %}<|python_tag|>{% endif %}", "llama3_json"),
        ("{% if tools %}what{% endif %}", None),
        ("<tool_call>", None),
    ],
)
def test_a_template_tells_its_family(template: str, family: str | None) -> None:
    assert family_of(template) == family


def test_arguments_are_json(seed: int = 5) -> None:
    """Whatever the arguments are, they come out as they went in."""
    draw = random.Random(seed)
    for _ in range(100):
        value = _random_object(draw, 3)
        text = json.dumps({"name": "f", "arguments": value}, indent=draw.choice([None, 1]))
        pieces = list(f"<tool_call>{text}</tool_call>")
        [(name, arguments)] = summary(read(make_parser("hermes"), pieces))[1]
        assert (name, json.loads(arguments)) == ("f", value)


def _random_object(draw: random.Random, depth: int) -> dict[str, Any]:
    keys = [f"k{number}" + draw.choice('"{}[]:, ') for number in range(3)]
    return {key: _random_value(draw, depth) for key in keys}


def _random_value(draw: random.Random, depth: int) -> Any:
    if depth and draw.random() < 0.4:
        return draw.choice([_random_object, _random_list])(draw, depth - 1)
    return draw.choice([1, -2.5, None, True, "", 'a"}{][,:\\', "é\n"])


def _random_list(draw: random.Random, depth: int) -> list[Any]:
    return [_random_value(draw, depth) for _ in range(draw.randint(0, 3))]
