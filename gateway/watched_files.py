"""Files that may change while the gateway runs: keys and certificates. Notices when they do.

Owns the looking, not the files: what is done about a change is the caller's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

POLL_S = 1.0

State = tuple[int, int, int]


class WatchedFiles:
    """Some files that belong together, and what to call when one of them is not as it was."""

    def __init__(self, paths: Sequence[Path], on_change: Callable[[], None]) -> None:
        self._paths = paths
        self._on_change = on_change
        self._seen = self._look()

    async def watch(self) -> NoReturn:
        """Look every POLL_S, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            seen = self._look()
            if seen != self._seen:
                self._seen = seen
                self._on_change()

    def _look(self) -> list[State | None]:
        return [_state(path) for path in self._paths]


def _state(path: Path) -> State | None:
    """Tell a file from what it was before, also if another took its place; None without one."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
