"""Requests in their one total order.

Owns an order and nothing else. The order of a request never changes while it is in a queue, so
nothing is ever sorted again: one that was preempted finds its old place in front of those that came
later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from scheduler_svc.core.request import Request

_order = attrgetter("order")


class RequestQueue:
    """Insertion and removal cost a binary search and one move of memory."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def push(self, request: Request) -> None:
        """Add a request at its place."""
        insort(self._requests, request, key=_order)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        index = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[index] is request
        del self._requests[index]
