"""Entries of `requests` that leaders die on: found one by one, and set aside after two deaths.

Every leader begins by taking in what is in flight. If one entry kills it, the next one would die
in the same place, and nobody would be served again. So starts that did not get through are counted
in Redis. After two of those the next start takes the entries in one at a time, each marked before
it is touched, until a step with it has gone out. What was marked at a death is taken in last the
next time, and not at all after a second death on it: it ends with an error, and stands in `dead`.

A failure that can be caught needs no second death: the core may be in pieces after it, so the epoch
ends, and the next one begins without that entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import structlog

from scheduler_svc.intake import Intake
from scheduler_svc.ledger import Ledger
from scheduler_svc.recovery import Found, InFlight
from wire import codec
from wire.bus import Bus, BusError, Entry, retrying
from wire.codec import WireError
from wire.keys import entry_id

log = structlog.get_logger()

MAX_UNFINISHED = 2
"""Starts in a row, this one included, that may take all in at once."""

MAX_DEATHS = 2
"""Careful starts that may die on one entry."""

REASON = "the scheduler died on this request"


class EpochOverError(Exception):
    """An epoch cannot go on; the next one begins from what Redis holds."""


class Caution:
    """Takes in what a new leader found, all of it or entry by entry."""

    def __init__(self, bus: Bus, epoch: int, intake: Intake, ledger: Ledger) -> None:
        self._bus = bus
        self._epoch = epoch
        self._intake = intake
        self._ledger = ledger
        self._one_by_one: deque[InFlight] = deque()
        self._deaths: dict[str, int] = {}  # by entry

    @property
    def is_taking_in(self) -> bool:
        """Whether entries are left for `take_next`."""
        return bool(self._one_by_one)

    async def begin(self, found: Found) -> None:
        """Take in what was found, or only begin to, if the start before did not get through."""
        starts = await retrying(partial(self._bus.note_start, self._epoch))
        suspect = starts.get("entry", "")
        self._deaths = {suspect: int(starts.get("deaths", 0))}
        if self._deaths[suspect] >= MAX_DEATHS:
            await self._set_aside(suspect, found, starts.get("reason") or REASON)
        in_flight = sorted(found.in_flight, key=lambda one: entry_id(one.req) == suspect)
        if int(starts.get("unfinished", 0)) > MAX_UNFINISHED:
            log.warning("careful_start", unfinished=starts["unfinished"], suspect=suspect)
            self._one_by_one.extend(in_flight)
            return
        for one in in_flight:
            async with self.blaming(entry_id(one.req)):
                self._intake.add(one.req, one.request, one.num_saved)

    async def take_next(self) -> None:
        """Mark one entry more and take it in."""
        one = self._one_by_one.popleft()
        entry = entry_id(one.req)
        await self._suspect(entry, self._deaths.get(entry, 0) + 1)
        async with self.blaming(entry):
            self._intake.add(one.req, one.request, one.num_saved)

    async def all_in(self) -> None:
        """A step has gone out with the last of them: none is under suspicion any more."""
        await self._suspect("", 0)

    async def survive(self) -> None:
        """Let the start have got through: this leader leads."""
        await retrying(partial(self._bus.note_survival, self._epoch))

    @asynccontextmanager
    async def blaming(self, entry: str) -> AsyncIterator[None]:
        """Condemn an entry if the block fails while it applies it. EpochOverError says so."""
        try:
            yield
        except (WireError, BusError):
            raise
        except Exception as error:
            log.exception("entry_failed", entry=entry)
            reason = f"{REASON}: {type(error).__name__}: {error}"
            await self._suspect(entry, MAX_DEATHS, reason)
            raise EpochOverError(f"entry {entry} could not be applied") from None

    async def _suspect(self, entry: str, deaths: int, reason: str = "") -> None:
        await retrying(partial(self._bus.suspect, self._epoch, entry, deaths, reason))

    async def _set_aside(self, entry: str, found: Found, reason: str) -> None:
        """End the request of an entry without ever showing it to the core."""
        for one in [one for one in found.in_flight if entry_id(one.req) == entry]:
            found.in_flight.remove(one)
            await self._bury(entry, codec.encode(one.request), reason)
            self._ledger.track(one.req, one.request, one.num_saved)
            self._ledger.refuse(one.req, REASON)
        for control in [control for control in found.controls if control[0] == entry]:
            found.controls.remove(control)
            await self._bury(entry, codec.encode(control[1]), reason)

    async def _bury(self, entry: str, body: bytes, reason: str) -> None:
        log.error("entry_buried", entry=entry, error=reason)
        dead = Entry(self._bus.keys.requests(), entry, {"body": body})
        await retrying(partial(self._bus.bury, dead, reason))
