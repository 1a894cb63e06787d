"""One call written as a JSON object, read character by character.

    {"name": "f", "arguments": {"a": [1, 2]}}      or "parameters", in either order

The arguments are handed out as they come, just as they are written. If they are a string (some
models write JSON into it), what the string says is handed out, at its end.
"""

from __future__ import annotations

import json
from enum import Enum, auto

from gateway.tools.parts import CallArguments, CallStart, Part

_ARGUMENTS = {"arguments", "parameters"}


class _Place(Enum):
    """Where in the object the next character is."""

    START = auto()  # before the brace
    KEY = auto()  # before a key or the end
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()  # before a value
    IN_VALUE = auto()
    DONE = auto()
    BROKEN = auto()


class CallScanner:
    """Reads one object; with a name, one that holds nothing but that call's arguments."""

    def __init__(self, name: str | None = None) -> None:
        self._is_bare = name is not None
        self._place = _Place.VALUE if self._is_bare else _Place.START
        self._token = ""  # the key or the value so far
        self._key = "arguments" if self._is_bare else ""
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._name = name
        self._early = ""  # arguments that came before the name
        self.text = ""  # all that was read

    @property
    def is_done(self) -> bool:
        """Whether the object is complete and is a call."""
        return self._place is _Place.DONE and self._name is not None

    @property
    def is_broken(self) -> bool:
        """Whether this is certainly no call."""
        is_nameless = self._place is _Place.DONE and self._name is None
        return self._place is _Place.BROKEN or is_nameless

    @property
    def has_begun(self) -> bool:
        """Whether a part of it was handed out."""
        return self._name is not None

    def push(self, text: str) -> tuple[list[Part], str]:
        """Read up to the end of the object; what is certain by now, and the text behind it."""
        parts: list[Part] = []
        if self._is_bare and self._name is not None and text and not self.text:
            parts.append(CallStart(self._name))
        for index, character in enumerate(text):
            if self._place in (_Place.DONE, _Place.BROKEN):
                return parts, text[index:]
            self.text += character
            self._read(character, parts)
        return parts, ""

    def _read(self, character: str, parts: list[Part]) -> None:
        place = self._place
        if place is _Place.IN_KEY:
            self._read_key(character)
        elif place is _Place.IN_VALUE:
            self._read_value(character, parts)
        elif character.isspace():
            return
        elif place is _Place.VALUE:
            self._place, self._token, self._depth = _Place.IN_VALUE, "", 0
            self._read_value(character, parts)
        else:
            self._place = {
                (_Place.START, "{"): _Place.KEY,
                (_Place.KEY, '"'): _Place.IN_KEY,
                (_Place.KEY, ","): _Place.KEY,
                (_Place.KEY, "}"): _Place.DONE,
                (_Place.COLON, ":"): _Place.VALUE,
            }.get((place, character), _Place.BROKEN)
            self._token = ""

    def _read_key(self, character: str) -> None:
        if character == '"':
            self._key, self._place = self._token, _Place.COLON
        else:
            self._token += character

    def _read_value(self, character: str, parts: list[Part]) -> None:
        """Take a character of a value; a scalar ends before a comma or a brace."""
        if not self._in_string and self._depth == 0 and character in ",}" and self._token:
            self._end_value(parts)
            self._place = _Place.KEY if character == "," else _Place.DONE
            return
        self._token += character
        if self._in_string:
            self._in_string = self._is_escaped or character != '"'
            self._is_escaped = not self._is_escaped and character == "\\"
        else:
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
        if self._key in _ARGUMENTS and self._token[0] in "{[":
            self._hand_out(character, parts)
        if self._depth == 0 and not self._in_string and self._token[0] in '{["':
            self._end_value(parts)
            self._place = _Place.DONE if self._is_bare else _Place.KEY

    def _end_value(self, parts: list[Part]) -> None:
        token, key = self._token.strip(), self._key
        if key == "name" and self._name is None:
            try:
                name = json.loads(token)
            except ValueError:
                name = None
            if isinstance(name, str):
                self._name = name
                parts.append(CallStart(name))
                self._hand_out(self._early, parts)
                self._early = ""
        elif key in _ARGUMENTS and token[0] not in "{[":
            self._hand_out(_text_of(token), parts)

    def _hand_out(self, text: str, parts: list[Part]) -> None:
        if self._name is None:
            self._early += text
        elif text:
            parts.append(CallArguments(text))


def _text_of(scalar: str) -> str:
    """Arguments that are no object: what a string says, and nothing for null."""
    try:
        value = json.loads(scalar)
    except ValueError:
        return scalar
    if value is None:
        return "{}"
    return value if isinstance(value, str) else scalar
