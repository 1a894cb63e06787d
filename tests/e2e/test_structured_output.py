"""Structured output of the demo model: every answer ends by itself, and is what was asked for."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.fakes.json_beginnings import can_be_ended
from tests.fakes.running_stack import RunningStack
from tests.fakes.schemas import random_schema

pytestmark = pytest.mark.e2e

ROOM = 1200  # tokens: more than the longest instance has
NUM_SCHEMAS = int(os.environ.get("TEST_SCHEMAS", "200"))  # of the long form


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="none")


def answer(client: openai.OpenAI, schema: dict[str, Any], **options: Any) -> Any:
    response = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"Give me an example of {json.dumps(schema)}"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "example", "schema": schema, "strict": True},
        },
        max_tokens=ROOM,
        **options,
    )
    return response.choices[0]


def check(client: openai.OpenAI, seed: int) -> None:
    schema = random_schema(seed)
    choice = answer(client, schema, temperature=1.0, seed=seed)
    assert choice.finish_reason == "stop", (schema, choice.message.content)
    jsonschema.validate(json.loads(choice.message.content), schema)


def test_random_schemas_are_met(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda seed: check(client, seed), range(8)))


@pytest.mark.long
def test_many_random_schemas_are_met(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda seed: check(client, seed), range(100, 100 + NUM_SCHEMAS)))


ENDLESS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}, "minItems": 50},
    {"type": "array", "items": {"type": "array", "items": {"type": "number"}}, "minItems": 50},
    {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 30},
    {
        "type": "object",
        "properties": {"names": {"type": "array", "items": {"type": "string"}, "minItems": 99}},
        "required": ["names"],
        "additionalProperties": False,
    },
]


@pytest.mark.parametrize("place", range(len(ENDLESS)))
def test_what_was_said_is_always_the_beginning_of_something_that_fits(
    client: openai.OpenAI, place: int
) -> None:
    """Where a schema has no end, the output is cut wherever the tokens ran out."""
    loose = json.loads(json.dumps(ENDLESS[place]).replace('"min', '"x-min'))
    said = ""
    stream = client.completions.create(
        model="demo",
        prompt="A list of words:",
        max_tokens=40,
        temperature=1.0,
        seed=place,
        stream=True,
        extra_body={"structured_outputs": {"json": ENDLESS[place]}},
    )
    for chunk in stream:
        said += chunk.choices[0].text
        assert can_be_ended(said, loose), said
    assert chunk.choices[0].finish_reason == "length" or json.loads(said) is not None


class Person(BaseModel):
    """What the client's own parser turns into a schema."""

    name: str
    age: int


def test_the_clients_own_parser_gets_its_type(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": "Who is Alice, who is 30? In JSON."}],
        response_format=Person,
        max_tokens=200,
        temperature=0,
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


def test_a_worker_that_dies_in_mid_grammar_changes_nothing(
    stack: RunningStack, client: openai.OpenAI
) -> None:
    schema = {
        "type": "array",
        "items": {"type": "string", "minLength": 6, "maxLength": 6},
        "minItems": 12,
        "maxItems": 12,
    }
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": "Twelve words:",
        "max_tokens": ROOM,
        "temperature": 0,
        "extra_body": {"structured_outputs": {"json": schema}},
    }
    undisturbed = client.completions.create(**body).choices[0].text
    assert len(json.loads(undisturbed)) == 12
    before = stack.pids()["worker"]
    said = ""
    for number, chunk in enumerate(client.completions.create(**body, stream=True)):
        said += chunk.choices[0].text
        if number == 20:
            os.kill(before, signal.SIGKILL)
    assert said == undisturbed
    stack.wait_replaced("worker", before)
