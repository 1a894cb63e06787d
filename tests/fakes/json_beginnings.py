"""Whether a text is the beginning of a JSON document that a schema allows: it is ended and tried.

Knows of schemas only what a validator says; so the schema must not ask for more than there is room
for in a few characters, or none of the ends fits.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema

_ENDS_OF_STRINGS = ('"', '\\"', 'n"', '0"', '00"', '000"', 'u0000"', '0000"', '\\udc00"')
_VALUES = ("", "0", '""', "[]", ": 0", ':""', ': ""', ": []", '"x":""', '"x": ""', '"names": []')
_TAILS = ("", "rue", "alse", "ull", "ue", "lse", "ll", "e", "se", "l", ".0", "e0", "-0", "+0")


def can_be_ended(text: str, schema: dict[str, Any]) -> bool:
    """Whether one of the ends that are known makes it a document of the schema."""
    if not text:
        return True
    closing, is_in_string = _open_places(text)
    names = [f'{name[i:]}"' for name in schema.get("properties", ()) for i in range(len(name))]
    strings = [*_ENDS_OF_STRINGS, *names] if is_in_string else _TAILS
    return any(
        _fits(text + string + value + closing, schema)
        for string, value in itertools.product(strings, _VALUES)
    )


def _open_places(text: str) -> tuple[str, bool]:
    """The brackets that are to be closed, in order, and whether the text ends within a string."""
    stack: list[str] = []
    is_in_string = is_escaped = False
    for character in text:
        if is_in_string:
            is_in_string = is_escaped or character != '"'
            is_escaped = not is_escaped and character == "\\"
        elif character == '"':
            is_in_string = True
        elif character in "{[":
            stack.append("}" if character == "{" else "]")
        elif character in "}]" and stack:
            stack.pop()
    return "".join(reversed(stack)), is_in_string


def _fits(text: str, schema: dict[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
