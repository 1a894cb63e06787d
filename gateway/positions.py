"""Where a client is in a stream that it may come back to: the ids of events. Pure.

An id says what the client has once it has the event:

    <request id>/<events of choice 0>,<of choice 1>,…[/<events after the last output>]

An event of a choice is an output token. The opening of a choice, where there is one, is number 0:
the place of a choice without it is empty. An end that no token brought (an abort, say) is one more.
Events after the last output are the usage, an error and the end mark. Where one output brings
several events they count as one here, and the last of them has the id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.errors import invalid

HEADER = "Last-Event-ID"
NOT_OPENED = -1

_ID = re.compile(r"([^/]*)/([0-9]{0,9}(?:,[0-9]{0,9})*)(?:/([0-9]))?")


@dataclass(frozen=True, slots=True)
class Position:
    """How many events a client has, of each choice and after the last output."""

    choices: tuple[int, ...]
    closing: int = 0


def position_from(event_id: str, req_id: str, num_choices: int) -> Position:
    """Read the id of the last event that a client has. Raises ApiError if it is none of these."""
    match = _ID.fullmatch(event_id)
    counts = match[2].split(",") if match is not None else []
    if match is None or match[1] != req_id or len(counts) != num_choices:
        raise invalid(
            f"the header {HEADER} must be an id that an event of the stream {req_id} had", HEADER
        )
    choices = tuple(int(count) if count else NOT_OPENED for count in counts)
    return Position(choices, int(match[3] or 0))


class Numbering:
    """Counts the events of one answer, gives them ids, and knows those that the client has.

    Without a request id the ids are empty: nobody can come back to such a stream.
    """

    def __init__(
        self, req_id: str, num_choices: int, *, has_opening: bool, have: Position | None = None
    ) -> None:
        start = NOT_OPENED if has_opening else 0
        self._req_id = req_id
        self._counts = [start] * num_choices
        self._num_closing = 0
        self._have = have or Position((start,) * num_choices)
        self.is_fresh = have is None

    def next_of(self, index: int) -> str | None:
        """Count an event of a choice; its id, or None if the client has it."""
        self._counts[index] += 1
        return self._id() if self._counts[index] > self._have.choices[index] else None

    def next_closing(self) -> str | None:
        """Count an event after the last output; its id, or None if the client has it."""
        self._num_closing += 1
        return self._id() if self._num_closing > self._have.closing else None

    def _id(self) -> str:
        """Say what the client has by now, be it of this response or of an earlier one."""
        if not self._req_id:
            return ""
        counts = map(max, self._counts, self._have.choices)
        places = ",".join("" if count == NOT_OPENED else str(count) for count in counts)
        closing = f"/{self._num_closing}" if self._num_closing else ""
        return f"{self._req_id}/{places}{closing}"
