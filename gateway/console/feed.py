"""The stream behind the console: one look at the pool every TICK_S, however many watch.

Owns the looking, and how often anything is sent. A viewer that is slow misses looks, and is then
told everything anew; nothing piles up for it. While nobody watches, nothing is read.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from gateway.console.board import Audience, Board
from gateway.console.history import History
from gateway.console.sight import Eye
from wire.bus import Bus, BusError

TICK_S = 0.5
MAX_VIEWERS = 64


class TooManyViewersError(Exception):
    """So many watch already that no more are let in."""


class Feed:
    """What this gateway shows to all its viewers."""

    def __init__(self, bus: Bus, state: Callable[[], str]) -> None:
        """`state` is that of this gateway, in one word."""
        self.history = History()
        self._bus = bus
        self._state = state
        self._eye, self._board = Eye(bus), Board()
        self._problem: str | None = None
        self._version = 0
        self._points_before = 0  # number of points that the look before knew
        self._points_now = 0
        self._num_viewers = 0
        self._frames: dict[tuple[Audience, bool], bytes] = {}
        self._news = asyncio.Condition()
        self._is_watched = asyncio.Event()
        self._is_closed = False

    async def run(self) -> NoReturn:
        """Look while anybody watches, until cancelled."""
        while True:
            await self._is_watched.wait()
            started = time.monotonic()
            await self._look()
            async with self._news:
                self._news.notify_all()
            await asyncio.sleep(max(0.0, started + TICK_S - time.monotonic()))

    async def close(self) -> None:
        """End every stream."""
        async with self._news:
            self._is_closed = True
            self._news.notify_all()

    async def watch(self, audience: Audience) -> AsyncGenerator[bytes]:
        """Events for one viewer, from all there is to what changed. Raises TooManyViewersError."""
        with self._seat():
            seen, is_first = self._version, True  # nothing that is older than this moment
            while await self._has_more_than(seen):
                is_next = seen == self._version - 1 and not is_first
                seen, is_first = self._version, False
                yield self._frame(audience, is_delta=is_next)

    async def _has_more_than(self, seen: int) -> bool:
        """Wait for the next look; False if there will be none."""
        async with self._news:
            await self._news.wait_for(lambda: self._version != seen or self._is_closed)
        return not self._is_closed

    @contextmanager
    def _seat(self) -> Iterator[None]:
        if self._num_viewers >= MAX_VIEWERS:
            raise TooManyViewersError
        self._num_viewers += 1
        self._is_watched.set()
        try:
            yield
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._is_watched.clear()

    async def _look(self) -> None:
        try:
            sight = await self._eye.look()
        except BusError as error:
            self._problem = f"the pool cannot be seen: {error}"
            self._board.nothing_new()
        else:
            self._problem = None
            self._board.update(sight)
        self._points_before, self._points_now = self._points_now, self.history.last
        self._version += 1
        self._frames.clear()

    def _frame(self, audience: Audience, *, is_delta: bool) -> bytes:
        """The last look as an event; made once for all that may know the same."""
        if (frame := self._frames.get((audience, is_delta))) is not None:
            return frame
        board = self._board
        value = board.delta(audience) if is_delta else board.full(audience)
        points = self.history.since(self._points_before if is_delta else 0)
        if points:
            value["points"] = points
        value |= {"now": round(time.time() * 1000), "state": self._state()}
        if self._problem is not None:
            value["problem"] = self._problem
        frame = event("change" if is_delta else "all", value)
        self._frames[audience, is_delta] = frame
        return frame


def event(kind: str, value: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return f"event: {kind}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()
