"""Whether the `make` that runs `up` wants to end.

GNU make passes on a SIGTERM, but keeps a SIGINT or SIGHUP that is sent to it alone to itself and
waits for its recipe. While it does, it holds the signal blocked, which the kernel shows. So
`make up` watches for that, and for make's death.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

_POLL_S = 0.2
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_ENDING_MASK = sum(1 << (number - 1) for number in _ENDING)


async def until_ending(make_pid: int) -> None:
    """Return once the parent process `make_pid` is gone or waits with an ending signal blocked."""
    while os.getppid() == make_pid and not _holds_ending_signal(make_pid):  # noqa: ASYNC110 - no event tells
        await asyncio.sleep(_POLL_S)


def _holds_ending_signal(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended, or this is not Linux: then only its end is seen
        return False
    blocked = next(line for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(blocked.split()[1], 16) & _ENDING_MASK)
