"""What was decided becomes durable: one commit at a time, and what comes meanwhile shares the next.

Owns the numbers of an epoch's commits. Steps never wait for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.ledger import Ledger
from scheduler_svc.statistics import Statistics
from scheduler_svc.traces import RequestTraces
from wire.bus import Bus, retrying


class Commits:
    """The commits of one leader."""

    def __init__(
        self,
        bus: Bus,
        scheduler: Scheduler,
        ledger: Ledger,
        statistics: Statistics,
        retention_s: Callable[[], float],
        *,
        traces: RequestTraces | None = None,
    ) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._ledger = ledger
        self._statistics = statistics
        self._retention_s = retention_s
        self._traces = traces
        self._something = asyncio.Event()
        self._number = 0
        self._is_closing = False

    def collect(self) -> None:
        """Hand what the core decided to the ledger, for the next commit."""
        outputs = self._scheduler.take_outputs()
        if outputs:
            if self._traces is not None:
                self._traces.collected(outputs)
            requests = self._scheduler.requests
            started = [one.req for one in outputs.started if one.req in requests]
            self._ledger.add(outputs, {req: requests[req].worker or "" for req in started})
        self._something.set()

    async def run(self) -> None:
        """Commit until `close`. FencedError if another epoch leads or Redis has lost a commit."""
        while not self._is_closing:
            await self._something.wait()
            self._something.clear()
            commit = self._ledger.take(self._scheduler.served)
            if commit is None:
                continue
            commit.stats = self._statistics.changes(time.monotonic())
            self._number += 1
            started = time.monotonic()
            call = partial(self._bus.commit, self._scheduler.epoch, self._number, commit)
            await retrying(partial(call, self._retention_s()))
            self._statistics.note_commit(time.monotonic() - started)

    def close(self) -> None:
        """Let the commit that is due be the last."""
        self._is_closing = True
        self._something.set()
