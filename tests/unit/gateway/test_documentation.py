"""The page for clients names every field that a request may have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from gateway.openai import ChatBody, CompletionBody

PAGE = (Path(__file__).parents[3] / "docs" / "clients.md").read_text(encoding="utf-8")
NAMED = set(re.findall(r"`([a-z_]+)`", PAGE))


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
def test_every_field_is_there(body: type[Any]) -> None:
    assert set(body.model_fields) <= NAMED


def test_ranges_are_those_of_the_types() -> None:
    properties = CompletionBody.model_json_schema()["properties"]
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ([^|]*) \|", PAGE, re.MULTILINE))
    assert rows["n"].startswith(f"{properties['n']['minimum']} to {properties['n']['maximum']},")
    logprobs = properties["prompt_logprobs"]["anyOf"][0]
    assert rows["prompt_logprobs"] == f"{logprobs['minimum']} to {logprobs['maximum']}"
    assert rows["bad_words"].startswith(f"up to {properties['bad_words']['maxItems']} ")
    temperature = properties["temperature"]["anyOf"][0]
    assert rows["temperature"].startswith(f"0 to {temperature['maximum']:g},")
