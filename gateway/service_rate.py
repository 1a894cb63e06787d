"""How fast the pool gets through its requests, to tell a client that finds it full when to return.

The pool's tokens per second come from its counters, as they grew while it had something to do; the
length of an answer from those that ended here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import NoReturn

from gateway.errors import RETRY_SOON_S
from wire.bus import Bus, BusError

SAMPLE_S = 1.0
MEMORY_S = 10.0  # time in which a sample loses most of its weight
LENGTH_WEIGHT = 0.1  # of one more answer in the mean length
LONGEST_S = 60


class ServiceRate:
    """Running means; without a figure yet, everybody may come back soon."""

    def __init__(self) -> None:
        self._tokens_per_s: float | None = None
        self._tokens_per_request: float | None = None
        self._last: tuple[float, int, str] | None = None  # time, tokens, epoch

    async def run(self, bus: Bus) -> NoReturn:
        """Read the pool's counters over and over, until cancelled."""
        while True:
            try:
                self.note(await bus.stats(), time.monotonic())
            except BusError:
                self._last = None
            await asyncio.sleep(SAMPLE_S)

    def note(self, stats: Mapping[str, str], now: float) -> None:
        """Take a sample of the counters; `now` is in seconds."""
        epoch, tokens = stats.get("epoch", ""), int(stats.get("generation_tokens_total", 0))
        last, self._last = self._last, (now, tokens, epoch)
        queues = ("num_requests_running", "num_requests_waiting")
        is_busy = any(int(stats.get(name, 0)) for name in queues)
        if last is None or last[2] != epoch or not is_busy or now <= last[0]:
            return
        seconds, rate = now - last[0], (tokens - last[1]) / (now - last[0])
        old = rate if self._tokens_per_s is None else self._tokens_per_s
        weight = 1 - math.exp(-seconds / MEMORY_S)
        self._tokens_per_s = old + weight * (rate - old)

    def note_end(self, num_output_tokens: int) -> None:
        """Note how long an answer was."""
        old = self._tokens_per_request
        old = num_output_tokens if old is None else old
        self._tokens_per_request = old + LENGTH_WEIGHT * (num_output_tokens - old)

    def seconds_for(self, num_waiting: int) -> int:
        """Time in which so many requests are served, from RETRY_SOON_S to LONGEST_S."""
        if self._tokens_per_s is None or self._tokens_per_request is None:
            return RETRY_SOON_S
        tokens = num_waiting * self._tokens_per_request
        if tokens >= LONGEST_S * self._tokens_per_s:
            return LONGEST_S
        return max(RETRY_SOON_S, math.ceil(tokens / self._tokens_per_s))
