"""Takes the names of dead processes off the rosters, once nobody needs to see them any more."""

from __future__ import annotations

import time
from asyncio import sleep
from typing import NoReturn

from wire.bus import Bus, BusDownError

ROLES = ("worker", "gateway", "scheduler")
INTERVAL_S = 5.0

SILENCE_S = 60.0
"""How long a silent process stays listed. One that only slept lists itself again."""


class Sweeper:
    """Remembers since when each listed process has been silent."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._silent_since: dict[tuple[str, str], float] = {}

    async def sweep_forever(self) -> NoReturn:
        """Look at the rosters, over and over."""
        while True:
            try:
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
