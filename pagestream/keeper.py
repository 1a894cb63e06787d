"""Keeps one child alive: starts it again when it dies, with growing pauses, until it is to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from pagestream.child import Child

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
LONG_LIFE_S = 30.0  # after a life of this length the pauses start anew

OnDeath = Callable[[Child, int, float], None]
"""Told of a death: the child, its exit code, the pause until it is started again."""


class Keeper:
    """The lives of one child. `keep` runs as a task until `stop` has been called."""

    def __init__(self, child: Child, on_death: OnDeath) -> None:
        self.child = child
        self._on_death = on_death
        self._has_ended = asyncio.Event()

    async def keep(self) -> None:
        """Start the child, again and again."""
        pause_s = FIRST_PAUSE_S
        to_stop = self.child.is_asked_to_stop
        try:
            while not to_stop.is_set():
                born = time.monotonic()
                code = await self.child.live()
                if to_stop.is_set():
                    break
                if time.monotonic() - born > LONG_LIFE_S:
                    pause_s = FIRST_PAUSE_S
                self._on_death(self.child, code, pause_s)
                with suppress(TimeoutError):
                    await asyncio.wait_for(to_stop.wait(), pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            self._has_ended.set()

    async def stop(self) -> None:
        """Ask the child to end, make it if it takes too long, and wait for that."""
        self.child.ask_to_stop()
        try:
            async with asyncio.timeout(self.child.service.patience_s):
                await self._has_ended.wait()
        except TimeoutError:
            self.child.kill()
            await self._has_ended.wait()
