"""Nothing that a test has started outlives it, however it ends: not even a `kill -9` of the tests.

A process beside this one waits for its end at a pipe, and then kills whatever carries this run's
mark in its environment. Children hand the mark on, wherever they go.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from contextlib import suppress
from pathlib import Path

MARK = "TESTED_BY"
_ROUNDS = 3  # a process that is just being made may be missed once

_pipe: int | None = None


def watch() -> None:
    """From now on, whoever descends from this process ends with it. Twice is as good as once."""
    global _pipe  # open until the end of this process
    if _pipe is not None:
        return
    os.environ[MARK] = secrets.token_hex(8)
    their_end, _pipe = os.pipe()
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-S", __file__, os.environ[MARK]]
    stdin = [(os.POSIX_SPAWN_DUP2, their_end, 0)]
    os.posix_spawn(sys.executable, command, unmarked, file_actions=stdin, setsid=True)
    os.close(their_end)


def marked(mark: str) -> list[int]:
    """Process ids of all that carry a mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(0, 1)  # until the other end is closed
    for _ in range(_ROUNDS):
        for pid in marked(sys.argv[1]):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
