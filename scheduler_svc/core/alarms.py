"""When somebody has waited too long: deadlines and queue timeouts, in order of time.

Owns the times. An alarm of a request that has ended meanwhile means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request


class Alarms:
    """A heap of (time in seconds of server time, request number)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def set(self, request: Request, config: SchedulerConfig) -> None:
        """Note when to look at a request that has just arrived."""
        if request.deadline is not None and config.deadline_action != "ignore":
            heappush(self._heap, (request.deadline, request.num))
        if config.queue_timeout_s:
            heappush(self._heap, (request.arrival + config.queue_timeout_s, request.num))

    def due(self, now: float) -> Iterator[int]:
        """Take out the numbers of the requests to look at now."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]

    def next(self) -> float | None:
        """Time of the next one."""
        return self._heap[0][0] if self._heap else None


def overdue(request: Request, now: float, config: SchedulerConfig) -> str | None:
    """Say why a request must not go on; None if it may."""
    is_past = request.deadline is not None and request.deadline <= now
    if is_past and config.deadline_action != "ignore":
        return "the deadline has passed"
    patience_s = config.queue_timeout_s
    if patience_s and not request.was_started and request.arrival + patience_s <= now:
        return f"no worker had room for it within {patience_s:g} s"
    return None
