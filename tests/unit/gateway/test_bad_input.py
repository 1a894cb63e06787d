"""Every field of every body, with each wrong type and each value beyond its range: 400 by name.

The table is made from the description that the bodies give of themselves, so that no field can be
left out; what the ranges have to be is written down in `test_openai.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.openai import ChatBody, CompletionBody, ResponsesBody, parse

ENOUGH: dict[type[Any], dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    ResponsesBody: {"input": "x"},
}
PROBES: dict[str, Any] = {
    "boolean": True,
    "integer": 1,
    "number": 1.5,
    "string": "1",
    "array": [[["x"]]],
    "object": {"x": [1]},
}
REQUIRED = {"prompt", "messages"}
CONTEXT = {"stream_options": {"stream": True}}
"""What must come with a field for it to be looked at."""


def description(cls: type[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = cls.model_json_schema()
    return schema


def alternatives(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The forms that a value may have."""
    if "$ref" in schema:
        yield from alternatives(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    elif "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from alternatives(one, root)
    else:
        yield schema


def kinds(schema: dict[str, Any], root: dict[str, Any]) -> set[str]:
    """Names of the JSON types that a field takes."""
    found = {form.get("type", "any") for form in alternatives(schema, root)}
    return found | ({"integer"} if "number" in found else set())


def beyond(form: dict[str, Any]) -> Iterator[Any]:
    """Values just outside the range of one form."""
    is_integer = form.get("type") == "integer"
    if "minimum" in form:
        yield form["minimum"] - 1 if is_integer else math.nextafter(form["minimum"], -math.inf)
    if "exclusiveMinimum" in form:
        yield form["exclusiveMinimum"]
    if "maximum" in form:
        yield form["maximum"] + 1 if is_integer else math.nextafter(form["maximum"], math.inf)
    if "maxLength" in form:
        yield "x" * (form["maxLength"] + 1)
    if "minLength" in form:
        yield "x" * (form["minLength"] - 1)
    if "enum" in form:
        yield "no such word"
    if "maxItems" in form:
        yield [good_item(form)] * (form["maxItems"] + 1)
    if "minItems" in form:
        yield [good_item(form)] * (form["minItems"] - 1)


def good_item(form: dict[str, Any]) -> Any:
    return PROBES.get(form.get("items", {}).get("type", "string"))


def wrong_values(schema: dict[str, Any], root: dict[str, Any]) -> Iterator[Any]:
    allowed = kinds(schema, root)
    if "any" not in allowed:
        yield from (value for kind, value in PROBES.items() if kind not in allowed)
    forms = list(alternatives(schema, root))
    for form in forms:
        yield from beyond(form)
    if items := [form["items"] for form in forms if "items" in form]:
        yield [None]
        yield from ([value] for value in wrong_values({"anyOf": items}, root))


TABLE = [
    pytest.param(cls, name, value, id=f"{cls.__name__}-{name}-{number}")
    for cls in ENOUGH
    for name, schema in description(cls)["properties"].items()
    for number, value in enumerate(wrong_values(schema, description(cls)))
]


@pytest.mark.parametrize(("cls", "name", "value"), TABLE)
def test_a_wrong_value_is_refused_by_name(cls: type[Any], name: str, value: Any) -> None:
    body = {**ENOUGH[cls], **CONTEXT.get(name, {}), name: value}
    with pytest.raises(ApiError) as caught:
        parse(cls, json.dumps(body).encode())
    error = caught.value
    assert error.status == 400
    assert error.param is not None
    assert error.param.split(".")[0] == name
    assert name in error.message
    assert len(error.message) < 500


@pytest.mark.parametrize("cls", ENOUGH)
def test_null_means_the_default(cls: type[Any]) -> None:
    default = parse(cls, json.dumps(ENOUGH[cls]).encode())
    nulls = dict.fromkeys([*cls.model_fields, *cls.unsupported])
    assert parse(cls, json.dumps({**nulls, **ENOUGH[cls]}).encode()) == default


@pytest.mark.parametrize(
    ("cls", "name"),
    [(CompletionBody, "prompt"), (ChatBody, "messages"), (ResponsesBody, "input")],
)
def test_only_what_is_required_may_not_be_null(cls: type[Any], name: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(cls, json.dumps({name: None}).encode())
    assert caught.value.param == name


def test_the_table_is_not_empty() -> None:
    assert len(TABLE) > 300
    assert {cls for cls, _, _ in (one.values for one in TABLE)} == set(ENOUGH)
