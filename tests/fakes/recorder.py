"""Stands in for CUDA graphs, and for a device that takes its time, on a machine without one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor


class Recorder:
    """Keeps work as a graph would: what it reads and writes are the same tensors each time."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1
        work()

        def replay() -> None:
            self.num_replays += 1
            work()

        return replay


class SlowDevice:
    """Tokens that come to the host when a test lets them, in the order of the steps."""

    def __init__(self) -> None:
        self.on_their_way: list[Slow] = []

    def __call__(self, source: Tensor) -> Slow:
        arrival = Slow(source)
        self.on_their_way.append(arrival)
        return arrival

    def complete(self) -> None:
        """The oldest step is done."""
        self.on_their_way.pop(0).event.set()

    def hurry(self) -> None:
        """All steps are done."""
        while self.on_their_way:
            self.complete()


class Slow:
    def __init__(self, source: Tensor) -> None:
        self.event = threading.Event()
        self._source = source

    def is_here(self) -> bool:
        return self.event.is_set()

    def numbers(self) -> list[int]:
        assert self.event.wait(30), "somebody waits for a step that is not complete"
        return [int(number) for number in self._source.tolist()]
