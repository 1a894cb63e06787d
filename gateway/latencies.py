"""How long clients of this gateway waited lately: for a first token, and from token to token.

Each gateway says it with its heartbeat, and the console adds them up.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
MAX_SAMPLES = 512
"""Samples kept; at more than these in a window, the latest count."""


class Latencies:
    """Samples of the last seconds. Noting one costs nothing but an append."""

    def __init__(self) -> None:
        self._first: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        self._later: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)

    def note_first(self, now: float, seconds: float) -> None:
        """A request had its first token, so long after its arrival."""
        self._first.append((now, seconds))

    def note_later(self, now: float, seconds: float) -> None:
        """A token came so long after the one before."""
        self._later.append((now, seconds))

    def fields(self, now: float) -> dict[str, str]:
        """For the heartbeat: median and 95th percentile in milliseconds, and of how many."""
        return {"ttft_ms": _summary(self._first, now), "itl_ms": _summary(self._later, now)}


def _summary(samples: deque[tuple[float, float]], now: float) -> str:
    while samples and samples[0][0] < now - WINDOW_S:
        samples.popleft()
    if not samples:
        return ""
    values = sorted(seconds for _, seconds in samples)
    median, high = values[len(values) // 2], values[min(len(values) - 1, len(values) * 95 // 100)]
    return f"{median * 1000:.1f} {high * 1000:.1f} {len(values)}"
