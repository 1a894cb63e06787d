"""Random JSON schemas whose instances are bounded, each part of them."""

from __future__ import annotations

import random
import string
from typing import Any


def random_schema(seed: int) -> dict[str, Any]:
    """An object of a few properties, three levels deep at most."""
    return _object(random.Random(seed), depth=3)


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 8))) for _ in range(3)]
    names = list(dict.fromkeys(names))[: draw.randint(1, 3)]
    return {
        "type": "object",
        "properties": {name: _value(draw, depth - 1) for name in names},
        "required": [name for name in names if draw.random() < 0.7],
        "additionalProperties": False,
    }


def _value(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _constant, _pattern, *[_object, _array, _optional] * (depth > 0)]
    return draw.choice(kinds)(draw, depth)


def _string(draw: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": draw.randint(0, 12)}


def _integer(draw: random.Random, _: int) -> dict[str, Any]:
    lowest = draw.randint(-1000, 1000)
    return {"type": "integer", "minimum": lowest, "maximum": lowest + draw.randint(0, 500)}


def _constant(draw: random.Random, _: int) -> dict[str, Any]:
    values = ["red", "grün", 1, -2.5, None, True, 'a "b"']
    return draw.choice([{"type": "boolean"}, {"type": "null"}, {"enum": draw.sample(values, k=3)}])


def _pattern(draw: random.Random, _: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^[A-Z]{{1,{draw.randint(1, 4)}}}-[0-9]{{2}}$"}


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randint(0, 2)
    items = _value(draw, depth - 1)
    most = least + draw.randint(0, 2)
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _optional(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(draw, depth - 1), {"type": "null"}]}
