"""Who runs on a data folder: one `up` at a time, found again by `down`.

Owns the pid file and the lock on it. The lock decides, and the kernel drops it when its holder dies
however that happens; the number in the file is only for `down`, so a stale one does no harm.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from wire.config import SettingsError

_POLL_S = 0.05


def prepare(data_dir: Path) -> None:
    """Make the data folder, for its owner only. SettingsError if that cannot be."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(data_dir, os.W_OK | os.X_OK):
            raise PermissionError("it cannot be written")
    except OSError as error:
        raise SettingsError(f"DATA_DIR={data_dir}: {error.strerror or error}") from None


@contextmanager
def claim(data_dir: Path) -> Iterator[None]:
    """Hold the data folder. SettingsError if another process holds it."""
    prepare(data_dir)
    with _pid_file(data_dir).open("a+") as file:
        if not _lock_soon(file.fileno()):
            raise SettingsError(
                f"DATA_DIR={data_dir}: `pagestream up` runs there already "
                f"(process {running(data_dir) or 'unknown'}); stop it with `pagestream down`"
            )
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
        file.truncate(0)


def running(data_dir: Path) -> int | None:
    """Process id of the `up` that holds the data folder; None if there is none."""
    try:
        with _pid_file(data_dir).open("r") as file:
            while not _try_lock(file.fileno(), fcntl.LOCK_SH):
                text = file.read().strip()
                if text:
                    return int(text)
                time.sleep(_POLL_S)  # it has the lock and is about to write its number
                file.seek(0)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return None


def stop(data_dir: Path) -> int | None:
    """Ask the `up` of this data folder to stop, and wait until it has.

    Returns the process that was stopped; None if none was there.
    """
    pid = running(data_dir)
    if pid is None:
        return None
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    while running(data_dir) == pid:
        time.sleep(_POLL_S)
    return pid


def _pid_file(data_dir: Path) -> Path:
    return data_dir / "up.pid"


def _lock_soon(descriptor: int) -> bool:
    """Take the lock; somebody who only looks (`running`) has it for a moment."""
    for _ in range(5):
        if _try_lock(descriptor):
            return True
        time.sleep(_POLL_S)
    return False


def _try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
