"""The last minutes of the pool in figures, one point a second, for the charts.

Kept by each gateway, whether anybody looks or not.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from wire.bus import Bus, BusError

SAMPLE_S = 1.0
NUM_POINTS = 180

Point = list[float | None]
"""Time in ms, tokens generated a second, prompt tokens a second, cache hits in percent, blocks in
use in percent, running, waiting, swapped; then in ms the median and 95th percentile of the time to
the first token, and of the time between tokens. None: there is none."""


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    epoch: str
    generated: float
    scheduled: float
    queries: float
    hits: float


class History:
    """The points there are. `last` counts them all, also those that were forgotten."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)
        self._before: _Sample | None = None
        self.last = 0

    async def run(self, bus: Bus) -> NoReturn:
        """Take a point every second, until cancelled."""
        while True:
            try:
                stats, gateways = await bus.stats(), await bus.processes("gateway")
            except BusError:
                self._before = None
            else:
                self.note(stats, gateways.values(), time.monotonic(), time.time())
            await asyncio.sleep(SAMPLE_S)

    def since(self, last: int) -> list[Point]:
        """Points that came after the one with this number."""
        missing = min(self.last - last, len(self._points))
        return list(self._points)[len(self._points) - missing :]

    def note(
        self,
        stats: Mapping[str, str],
        gateways: Iterable[Mapping[str, str]],
        now: float,
        wall: float,
    ) -> None:
        """Take what the scheduler counts, and what the gateways measured. `now` is monotonic."""
        sample = _Sample(
            now,
            stats.get("epoch", ""),
            figure(stats, "generation_tokens_total"),
            figure(stats, "scheduled_tokens_total"),
            figure(stats, "prefix_cache_queries_total"),
            figure(stats, "prefix_cache_hits_total"),
        )
        before, self._before = self._before, sample
        rates: list[float | None] = [None, None, None]
        if before is not None and before.epoch == sample.epoch and now > before.at:
            seconds = now - before.at
            generated = (sample.generated - before.generated) / seconds
            scheduled = (sample.scheduled - before.scheduled) / seconds
            queries = sample.queries - before.queries
            hits = 100 * (sample.hits - before.hits) / queries if queries > 0 else None
            rates = [generated, max(0.0, scheduled - generated), hits]
        gateways = list(gateways)
        point: Point = [
            wall * 1000,
            *rates,
            100 * figure(stats, "kv_cache_usage_perc"),
            *(figure(stats, f"num_requests_{kind}") for kind in ("running", "waiting", "swapped")),
            *together(one.get("ttft_ms", "") for one in gateways),
            *together(one.get("itl_ms", "") for one in gateways),
        ]
        self._points.append([None if value is None else round(value, 1) for value in point])
        self.last += 1


def together(summaries: Iterable[str]) -> tuple[float | None, float | None]:
    """Of "median p95 count" of each gateway: the mean of the medians by count, the highest p95."""
    total, weighted, high = 0.0, 0.0, 0.0
    for summary in summaries:
        try:
            median, p95, count = map(float, summary.split())
        except ValueError:
            continue
        if not all(map(math.isfinite, (median, p95, count))):
            continue
        total, weighted, high = total + count, weighted + median * count, max(high, p95)
    return (weighted / total, high) if total > 0 else (None, None)


def figure(stats: Mapping[str, str], name: str) -> float:
    """Read a number of the scheduler's; 0 if there is none that can be shown."""
    try:
        value = float(stats.get(name) or 0)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
