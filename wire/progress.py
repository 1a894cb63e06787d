"""How far something is that takes its time: a stage with, where that is known, its share done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REPORT_EVERY_S = 0.3

_UNITS = ("B", "kB", "MB", "GB", "TB")


@dataclass(frozen=True, slots=True)
class Stage:
    """What is being done, and how many bytes of how many; 0 of 0 where nobody knows."""

    what: str
    num_done: int = 0
    num_bytes: int = 0

    @property
    def share(self) -> float | None:
        """From 0 to 1; None if it is not known."""
        return min(1.0, self.num_done / self.num_bytes) if self.num_bytes > 0 else None

    def __str__(self) -> str:
        if self.share is None:
            return self.what
        return f"{self.what}: {self.share:.0%} of {size(self.num_bytes)}"


Progress = Callable[[Stage], None]
"""Is told now and then; an exception from it stops the work."""


def size(num_bytes: int) -> str:
    """Bytes as people say them: 950 B, 1.5 kB, 270 MB."""
    number, unit = float(num_bytes), 0
    while number >= 999.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    digits = 1 if unit and number < 9.95 else 0
    return f"{number:.{digits}f} {_UNITS[unit]}"


class ByteBars:
    """Stands for tqdm where a library wants a class of bars: adds them up, and draws nothing.

    Bars that do not count bytes are ignored. Of those that do, several may count the same: the one
    that has got furthest is believed.
    """

    def __init__(self, what: str, tell: Progress) -> None:
        self._what = what
        self._tell = tell
        self._lock = threading.Lock()
        self._bars: list[Any] = []
        self._told_at = 0.0

    def bar_class(self, tqdm: type[Any]) -> type[Any]:
        """Make a subclass of `tqdm` whose bars report here."""
        bars = self

        class Bar(tqdm):  # type: ignore[misc] # a class from a library without types
            def __init__(self, *args: Any, **options: Any) -> None:
                options.pop("name", None)
                super().__init__(*args, **{**options, "disable": True})
                self.n = options.get("initial") or 0
                self.total = options.get("total") or 0
                if options.get("unit") == "B":
                    bars.follow(self)

            def update(self, n: float | None = 1) -> None:
                self.n += n or 0
                bars.report()

            def refresh(self, *_: Any, **__: Any) -> None:
                bars.report()

        return Bar

    def follow(self, bar: Any) -> None:
        """Count a bar in."""
        with self._lock:
            self._bars.append(bar)

    def report(self) -> None:
        """Tell how far it is, unless that was told a moment ago."""
        with self._lock:
            now = time.monotonic()
            if not self._bars or now - self._told_at < REPORT_EVERY_S:
                return
            self._told_at = now
            furthest = max(self._bars, key=lambda bar: bar.n)
            stage = Stage(self._what, int(furthest.n), int(furthest.total or 0))
        self._tell(stage)
