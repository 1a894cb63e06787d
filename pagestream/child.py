"""One process that `up` looks after: how it starts, what it writes, how it ends.

A child has a session of its own, so that a Ctrl-C on the terminal reaches only `up`; the kernel
kills it when `up` dies however that happens. Never decides when to start or stop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pagestream.plan import Service

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LOG_LIMIT = 8 * 1024 * 1024  # bytes


class Log:
    """What one service writes: a file of bounded size, of which `up` shows the new lines.

    A file and not a pipe, so that a service never waits for `up` to read.
    """

    def __init__(self, path: Path, limit: int = _LOG_LIMIT) -> None:
        self.path = path
        self.last_line = ""
        self._limit = limit
        self._rest = b""
        # Children inherit the append mode: they go on at the start once the file is cut to nothing.
        self._file = path.open("a+b", buffering=0)
        self._offset = path.stat().st_size

    def fileno(self) -> int:
        """Where a child writes."""
        return self._file.fileno()

    def new_lines(self) -> list[str]:
        """Return the whole lines that were written since the last call."""
        data = self._rest + os.pread(self._file.fileno(), self._limit, self._offset)
        self._offset += len(data) - len(self._rest)
        if self._offset > self._limit:
            self._file.truncate(0)
            self._offset = 0
        *whole, self._rest = data.split(b"\n")
        lines = [line.decode(errors="replace").rstrip() for line in whole]
        self.last_line = next((line for line in reversed(lines) if line), self.last_line)
        return lines

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Child:
    """The process of a service, through as many lives as it takes."""

    def __init__(self, service: Service, log: Log) -> None:
        self.service = service
        self.log = log
        self.is_asked_to_stop = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the life that runs; None if none does."""
        return None if self._process is None else self._process.pid

    async def live(self) -> int:
        """Run one life from start to end. Returns its exit code, negative for a signal."""
        service = self.service
        process = await asyncio.create_subprocess_exec(
            *service.command,
            env=dict(service.environ),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self.log.fileno(),
            stderr=self.log.fileno(),
            start_new_session=True,
            umask=0o077,
            preexec_fn=_dies_with(os.getpid()) if sys.platform == "linux" else None,
        )
        self._process = process
        try:
            if self.is_asked_to_stop.is_set():  # while it was being made
                self.ask_to_stop()
            return await process.wait()
        finally:
            self.kill()  # on cancellation; else what it has started itself and left behind
            self._process = None

    def ask_to_stop(self) -> None:
        """Send SIGTERM: end in order, and start no further life."""
        self.is_asked_to_stop.set()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End it and all that it has started, now."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """Exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _dies_with(parent: int) -> Callable[[], None]:
    """Make what runs in the child between fork and exec: the kernel is to kill it with `parent`."""
    prctl = ctypes.CDLL(None).prctl

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return arrange
