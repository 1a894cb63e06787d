"""The judge of what was streamed knows beginnings from what nothing can be made of."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.json_beginnings import can_be_ended

NAMED: dict[str, Any] = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string"}}},
    "required": ["names"],
    "additionalProperties": False,
}
WHOLE = '{"names": ["a\\n\\u00e9", "", "b"]}'


@pytest.mark.parametrize("length", range(len(WHOLE) + 1))
def test_every_beginning_is_one(length: int) -> None:
    assert can_be_ended(WHOLE[:length], NAMED)


@pytest.mark.parametrize(
    "text", ["[", '{"x', '{"names": 1', '{"names": ["a" "', '{"names": []}}', "x"]
)
def test_what_leads_nowhere_is_none(text: str) -> None:
    assert not can_be_ended(text, NAMED)


@pytest.mark.parametrize("text", ["[1", "[1.", "[[1.5e", "[-", "[1, ", "[1,", "[[], [2]"])
def test_numbers_and_lists(text: str) -> None:
    assert can_be_ended(text, {"type": "array"})
