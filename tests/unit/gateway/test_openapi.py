"""The description says what the gateway does: every route, and every field of every body."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema

from gateway.app import create_app
from gateway.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ResponsesBody,
    TokenizeBody,
)
from gateway.openapi import description
from wire.bus import Bus
from wire.config import load


def test_every_route_is_described_and_nothing_else() -> None:
    settings = load(redis_url="redis://127.0.0.1:1")
    app = create_app(settings, Bus.connect(settings))
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {
        (method, path) for path, methods in description()["paths"].items() for method in methods
    }
    assert described == routes


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def test_every_reference_leads_somewhere() -> None:
    found = set(references(description()))
    assert len(found) > 10
    for reference in found:
        value = description()
        for part in reference.removeprefix("#/").split("/"):
            value = value[part]


def test_the_bodies_are_described_field_by_field() -> None:
    schemas = description()["components"]["schemas"]
    for body in (ChatBody, CompletionBody, ResponsesBody, TokenizeBody, DetokenizeBody):
        assert set(schemas[body.__name__]["properties"]) == set(body.model_fields)


def test_a_good_body_is_one_by_the_description() -> None:
    whole = description()
    chat = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "temperature": 0.5,
        "stop": ["a"],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    }
    schema = {"$ref": "#/components/schemas/ChatBody", "components": whole["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(chat)
    assert not validator.is_valid({**chat, "temperature": 3})
    assert not validator.is_valid({"messages": []})


def test_the_model_is_the_one_that_is_served() -> None:
    whole = description("mine")
    schema = {"$ref": "#/components/schemas/CompletionBody", "components": whole["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"prompt": "x", "model": "mine"})
    assert validator.is_valid({"prompt": "x", "model": None})
    assert not validator.is_valid({"prompt": "x", "model": "another"})


def test_it_is_json() -> None:
    assert json.loads(json.dumps(description())) == description()
