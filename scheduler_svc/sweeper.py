"""What the dead leave behind in Redis, once nobody needs to see it any more.

Takes the names of dead processes off the rosters. Lets the streams fade of workers that were lost
while nobody led: a leader lays out only those of a worker that it has lost itself.
"""

from __future__ import annotations

import time
from asyncio import sleep
from collections.abc import Callable
from typing import NoReturn

import structlog

from scheduler_svc.worker_link import STREAM_TTL_S, process_of
from wire.bus import Bus, BusDownError

log = structlog.get_logger()

ROLES = ("worker", "gateway", "scheduler")
INTERVAL_S = 5.0

SILENCE_S = 60.0
"""How long a silent process stays listed. One that only slept lists itself again."""


class Sweeper:
    """Remembers since when each listed process has been silent."""

    def __init__(self, bus: Bus, epoch: int, used: Callable[[], set[str]]) -> None:
        self._bus = bus
        self._epoch = epoch
        self._used = used  # the workers, as processes, that the leader has to do with
        self._has_looked = False
        self._silent_since: dict[tuple[str, str], float] = {}

    async def sweep_forever(self) -> NoReturn:
        """Look at the rosters, over and over, and once at the streams."""
        while True:
            try:
                await self._lay_out_streams()
                for role in ROLES:
                    await self.sweep(role, time.monotonic())
            except BusDownError:
                self._silent_since.clear()
            await sleep(INTERVAL_S)

    async def sweep(self, role: str, now: float) -> None:
        """Take off the roster of a role whoever has been silent for too long."""
        for name, fields in (await self._bus.processes(role)).items():
            if fields:
                self._silent_since.pop((role, name), None)
            elif now - self._silent_since.setdefault((role, name), now) >= SILENCE_S:
                await self._bus.leave(role, name)
                del self._silent_since[role, name]

    async def _lay_out_streams(self) -> None:
        """Let the streams fade that belong to no worker that lives."""
        if self._has_looked:
            return
        streams = await self._bus.worker_streams()
        workers = await self._bus.processes("worker")
        alive = {process_of(name, fields) for name, fields in workers.items()} | self._used()
        dead = sorted(streams.keys() - alive)
        fading = [("EXPIRE", key, STREAM_TTL_S, "NX") for one in dead for key in streams[one]]
        await self._bus.write_as_leader(self._epoch, fading)
        self._has_looked = True
        if dead:
            log.info("dead_workers_found", workers=dead)
