"""What an output may look like is checked before anything is said, and reaches the worker."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.fakes.gateway_world import END, World
from wire import grammars

pytestmark = pytest.mark.redis

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}

GOOD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, grammars.of_json_schema(SCHEMA)),
    (
        {"response_format": {"type": "json_object"}},
        grammars.of_json_schema({"type": "object"}),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, grammars.of_json_schema(SCHEMA)),
    (
        {"structured_outputs": {"json": '{"type": "null"}'}},
        grammars.of_json_schema({"type": "null"}),
    ),
    ({"structured_outputs": {"json_object": True}}, grammars.of_json_schema({"type": "object"})),
    ({"structured_outputs": {"regex": "[ab]+"}}, grammars.of_regex("[ab]+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, grammars.of_choice(["a", "b"])),
    (
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
        grammars.of_grammar('root ::= "a" | "b"'),
    ),
]


@pytest.mark.parametrize(("fields", "grammar"), GOOD)
async def test_the_worker_gets_the_grammar_of_what_was_asked(
    world: World, fields: dict[str, Any], grammar: str
) -> None:
    assert (await world.complete("x", **fields))[0] == 200
    assert (await world.chat("x", **fields))[0] == 200
    for request in world.engine.requests:
        assert request.sampling.grammar == grammar
        assert request.sampling.eos_token_ids == [END]


async def test_a_text_is_held_to_nothing(world: World) -> None:
    await world.complete("x", response_format={"type": "text"})
    await world.complete("x", response_format=None, structured_outputs=None)
    assert [request.sampling.grammar for request in world.engine.requests] == [None, None]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def format_of(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


BAD: list[tuple[dict[str, Any], str, str]] = [
    (format_of({"type": "notatype"}), "response_format", "notatype"),
    (format_of({"$ref": "#"}), "response_format", "allows nothing"),
    (format_of({"$ref": "http://127.0.0.1/x"}), "response_format", ""),
    (format_of(nested(40)), "response_format.json_schema.schema", "levels deep"),
    (format_of({"description": "x" * 200_000}), "response_format.json_schema.schema", "characters"),
    (format_of({"not": {}}), "response_format", "not"),
    (format_of({"type": "string", "minLength": 3, "maxLength": 2}), "response_format", ""),
    (format_of([]), "response_format.json_schema.schema", ""),
    (format_of(None), "response_format.json_schema.schema", "required"),
    ({"response_format": {}}, "response_format.type", "required"),
    ({"response_format": {"type": "xml"}}, "response_format.type", ""),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", ""),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "(["}}, "structured_outputs", "regex"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs", "look-around"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "string"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", ""),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice.0", ""),
    ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs", "foo"),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar", ""),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "object"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", ""),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_grammar_is_a_400_with_its_place_and_its_reason(
    world: World, stream: bool
) -> None:
    for fields, param, words in BAD:
        status, body = await world.complete("x", stream=stream, **fields)
        assert (status, body["error"]["param"]) == (400, param), fields
        assert words in body["error"]["message"], fields
        assert len(body["error"]["message"]) < 1000
    assert not world.engine.requests
    assert (await world.complete("x"))[0] == 200


def letters(count: int) -> list[str]:
    return [chr(ord("a") + n) for n in range(count)]


def chain(count: int, rule: str) -> str:
    return "start: r0\n" + "".join(f"r{n}: {rule.format(n + 1)}\n" for n in range(count))


COSTLY: dict[str, dict[str, Any]] = {
    "expressions that all must match": format_of(
        {
            "type": "string",
            "allOf": [{"pattern": f".*{one}.{{5,90}}{one.upper()}.*"} for one in letters(20)],
        }
    ),
    "repetitions of repetitions": {
        "structured_outputs": {"regex": "(" * 300 + "a" + "{1,300})" * 300}
    },
    "parentheses 60,000 deep": {"structured_outputs": {"regex": "(" * 60_000 + "a" + ")" * 60_000}},
    "a chain of 2,000 rules": {
        "structured_outputs": {"grammar": chain(2000, "r{}") + 'r2000: "e"'}
    },
    "terminals that double 60 times": {
        "structured_outputs": {"grammar": chain(60, "r{0} r{0}").upper().replace("START", "start")}
    },
    "choices of choices": format_of(
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{n}{one}": {}}} for one in letters(3)]}
                for n in range(40)
            ]
        }
    ),
}


@pytest.mark.parametrize("fields", COSTLY.values(), ids=COSTLY.keys())
async def test_a_grammar_that_costs_too_much_is_refused_and_hurts_nobody(
    world: World, fields: dict[str, Any]
) -> None:
    """Some would take minutes and gigabytes, or overflow the stack of whoever compiles them."""
    asking = asyncio.ensure_future(world.complete("x", **fields))
    num_served = 0
    while not asking.done():
        assert (await world.complete("x"))[0] == 200
        assert (await world.complete("x", structured_outputs={"regex": f"a{num_served}"}))[0] == 200
        num_served += 1
    status, body = await asking
    assert status == 400, body
    assert body["error"]["param"] in fields
    assert num_served
    again = await world.complete("x", **fields)
    assert again == (status, body)


LARGE: dict[str, dict[str, Any]] = {
    "1,200 constants": format_of({"enum": [f"{'x' * 90}{n}" for n in range(1200)]}),
    "a million letters": {"structured_outputs": {"regex": "a{1,1000000}"}},
    "an expression that backtracking takes for ever on": {
        "structured_outputs": {"regex": "(a+)+b"}
    },
    "a list of a million": format_of({"type": "array", "minItems": 1_000_000}),
    "references that double 25 times": format_of(
        {
            "$ref": "#/$defs/d0",
            "$defs": {
                "d25": {"type": "integer"},
                **{
                    f"d{n}": {"properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "ab"}}
                    for n in range(25)
                },
            },
        }
    ),
}


@pytest.mark.parametrize("fields", LARGE.values(), ids=LARGE.keys())
async def test_a_grammar_is_not_refused_for_looking_large(
    world: World, fields: dict[str, Any]
) -> None:
    assert (await world.complete("x", **fields))[0] == 200


def tries_grammars(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "gateway.grammar_trial" in process.cmdline()
    return False


async def test_whoever_checks_grammars_may_be_killed(world: World) -> None:
    asked = {"structured_outputs": {"regex": "b{9}"}}
    assert (await world.complete("x", structured_outputs={"regex": "a{9}"}))[0] == 200
    trials = [one for one in psutil.Process().children(recursive=True) if tries_grammars(one)]
    assert trials  # whoever checks, and perhaps what it has forked for the last check
    for one in trials:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    while (found := await world.complete("x", **asked))[0] == 503:
        pass
    assert found[0] == 200
