"""What happens that people want to hear of, as a short stream in Redis. Nothing relies on it.

Owns what is still to be written; the mirror writes it, at its own pace. Bounded: of many events at
once the latest are kept, and a sentence says how many are missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from wire.bus import Argument
from wire.keys import Keys

Kind = Literal[
    "leader_changed",
    "worker_added",
    "worker_lost",
    "worker_refused",
    "gateway_joined",
    "gateway_draining",
    "gateway_left",
    "settings_changed",
    "preempted",
    "swapped",
    "failed",
    "events_skipped",
]

MAX_DUE = 64
"""Events kept until the next write."""

LENGTH = 256
"""Events kept in Redis."""

MAX_WORDS = 2000
"""Of one command; a script cannot take much longer ones apart."""

Command = tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, about one process or request."""

    kind: Kind
    about: str
    says: str = ""
    tenant: str = ""  # whose request it is about; nobody else hears of it


class Chronicle:
    """The events of one leader."""

    def __init__(self, keys: Keys) -> None:
        self._key = keys.events()
        self._due: deque[Event] = deque(maxlen=MAX_DUE)
        self._num_skipped = 0

    def note(self, kind: Kind, about: str, says: str = "", tenant: str = "") -> None:
        """Remember that something happened."""
        self._num_skipped += len(self._due) == MAX_DUE
        self._due.append(Event(kind, about, says[:300], tenant))

    def take(self) -> list[Command]:
        """Commands that write what has happened since the last time."""
        due, self._due = list(self._due), deque(maxlen=MAX_DUE)
        if self._num_skipped:
            due.insert(0, Event("events_skipped", "", f"{self._num_skipped} more happened"))
            self._num_skipped = 0
        return [self._written(event) for event in due]

    def _written(self, event: Event) -> Command:
        words = ("kind", event.kind, "about", event.about, "says", event.says)
        return ("XADD", self._key, "MAXLEN", LENGTH, "*", *words, "tenant", event.tenant)


def in_parts(command: Command, words: Sequence[Argument]) -> list[Command]:
    """One command for each few words of many, be they single ones or pairs."""
    starts = range(0, len(words), MAX_WORDS)
    return [(*command, *words[start : start + MAX_WORDS]) for start in starts]
