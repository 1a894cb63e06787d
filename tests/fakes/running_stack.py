"""A whole stack as processes, started by some command, to be asked, looked at and ended.

Knows its processes by their environment, so that whatever is left behind is found.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from wire import model_store
from wire.bus import Bus
from wire.config import load

ROOT = Path(__file__).parents[2]
PAGESTREAM = (sys.executable, "-P", "-m", "pagestream")
AUDITED = Path(__file__).with_name("audited")
PATIENCE_S = 300.0  # a busy machine converts the model in minutes


class RunningStack:
    """A stack that was started with some command; its processes are known by their environment."""

    def __init__(self, command: list[str], data_dir: Path, models: Path) -> None:
        self.data_dir = data_dir
        self.models = models
        self.port = free_port()
        self.environ = os.environ | {
            "PAGESTREAM_DATA_DIR": str(data_dir),
            "PAGESTREAM_PORT": str(self.port),
            "PAGESTREAM_MODEL_CACHE_DIR": str(models),
            "PAGESTREAM_DRAIN_TIMEOUT_S": "10",
            "PYTHONPATH": str(AUDITED),
            "UNPICKLED": str(data_dir.with_suffix(".unpickled")),
            "OMP_NUM_THREADS": "1",  # threads that wait for each other suffer on a busy machine
            "PAGESTREAM_KV_CACHE_MEMORY_BYTES": str(64 * 1024 * 1024),
        }
        self.errors = data_dir.with_suffix(".err")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.environ,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait for the line that scripts wait for."""
        assert self.process.stdout is not None
        select.select([self.process.stdout], [], [], PATIENCE_S)
        os.set_blocking(self.process.stdout.fileno(), False)
        line = self.process.stdout.readline()
        assert line == f"ready http://127.0.0.1:{self.port}\n", self.errors.read_text()[-2000:]

    def wait_said(self, text: str) -> None:
        """Wait until standard error has this."""
        self.wait_until(lambda: text in self.errors.read_text(), text, pause_s=0.05)

    def wait_replaced(self, role: str, pid: int) -> None:
        """Wait until another process has this role."""
        self.wait_until(lambda: self.pids().get(role) not in (None, pid), f"another {role}")

    def wait_until(self, is_so: Callable[[], bool], what: str, pause_s: float = 0.3) -> None:
        """Ask again and again; fails if what was started ends, or takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            is_on = self.process.poll() is None and time.monotonic() < deadline
            assert is_on, f"never: {what}\n{self.errors.read_text()[-2000:]}"
            time.sleep(pause_s)

    def unpickled(self) -> list[str]:
        """Whatever any of its processes has unpickled, and a line for each that is watched."""
        return Path(self.environ["UNPICKLED"]).read_text().splitlines()

    def run(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run the command line beside it, with something on its standard input."""
        return subprocess.run(
            [*PAGESTREAM, *arguments],
            env=self.environ,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

    def pids(self) -> dict[str, int | None]:
        """Process id by role, as `ps` knows them; of a role's living process if it has one."""
        done = self.run("ps", "--json")
        if done.returncode != 0:  # Redis is away
            return {}
        pids: dict[str, int | None] = {}
        for one in json.loads(done.stdout)["processes"]:
            pids[one["role"]] = one["pid"] or pids.get(one["role"])
        return pids

    def stats(self) -> dict[str, str]:
        """The pool's counters and gauges."""

        async def read() -> dict[str, str]:
            bus = Bus.connect(load(redis_url=f"unix://{self.data_dir}/redis.sock"))
            try:
                return await bus.stats()
            finally:
                await bus.close()

        return asyncio.run(read())

    def complete(self, prompt: str) -> str:
        """The model's greedy answer in a few tokens."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": 5, "temperature": 0}
        return str(self.post("/v1/completions", body)["choices"][0]["text"])

    def post(self, path: str, body: object) -> dict[str, Any]:
        """Send JSON, get JSON; a gateway that is away or not ready is asked again."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                    answer: dict[str, Any] = json.load(reply)
                    return answer
            except OSError as error:  # URLError and HTTPError are kinds of it
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                assert time.monotonic() < deadline, error
                time.sleep(0.1)

    def wait_end(self) -> int:
        """Wait for the end of what was started; returns its exit code."""
        return self.process.wait(timeout=PATIENCE_S)

    def leftovers(self) -> list[psutil.Process]:
        """Processes of this stack that are still there a little later."""
        found = [one for one in psutil.process_iter() if self._is_ours(one)]
        _, alive = psutil.wait_procs(found, timeout=20)
        return alive

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("PAGESTREAM_DATA_DIR") == str(self.data_dir)
        except psutil.Error:
            return False

    def close(self) -> None:
        """End whatever a failed test has left."""
        self.process.kill()
        self.process.wait()
        for process in self.leftovers():
            process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def model_folder(models: Path) -> Path:
    """The demo model in the form that the stack serves; made if it is not there."""
    return model_store.ensure(load(model_cache_dir=models))
