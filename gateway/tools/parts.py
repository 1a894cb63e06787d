"""What a text is made of, once it has been read: values, and who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model says to itself before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: the next one, with its name."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that began last: JSON text."""

    text: str


Part = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Reads a text piece by piece. How it is cut changes nothing but how its parts are cut."""

    def push(self, text: str) -> list[Part]:
        """Read more text; what is certain by now."""

    def finish(self) -> list[Part]:
        """The text is over: what was held back."""


def joined(parts: Sequence[Part]) -> list[Part]:
    """Put neighbours of one kind together."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        match last, part:
            case Content(before), Content(text):
                found[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                found[-1] = Reasoning(before + text)
            case CallArguments(before), CallArguments(text):
                found[-1] = CallArguments(before + text)
            case _:
                found.append(part)
    return found


def split_before(text: str, mark: str) -> tuple[str, str, bool]:
    """Split a text at a mark: what is before it, what is behind or held back, whether it is there.

    Held back is an end of the text that the mark could begin with.
    """
    before, found, behind = text.partition(mark)
    if found:
        return before, behind, True
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return text[:-size], text[-size:], False
    return text, "", False
