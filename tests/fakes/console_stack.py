"""A pool as processes, small enough to preempt, for somebody to look at in a browser.

Redis, a scheduler, oracle workers and gateways; each can be killed. Gives load as well: requests
that run on until they are closed. As a program, to look at the console by hand:

    python -m tests.fakes.console_stack [--load 12] [--blocks 96] [--workers 2]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.gateway_pool import FACTS
from tests.fakes.redis_server import RedisServer, find_binary
from tests.fakes.running_stack import ROOT, free_port
from tests.fakes.tokenizers import write_model_folder
from wire.api_keys import add_key

PATIENCE_S = 60.0


class ConsoleStack:
    """Starts everything when made; `close` leaves nothing."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 2,
        blocks: int = 96,
        cpu_blocks: int = 48,
        step_ms: float = 30.0,
        is_null: bool = False,
    ) -> None:
        kind = "valkey" if find_binary("valkey") else "redis"
        self.redis = RedisServer(kind)
        self.folder = folder
        self.keys_file = folder / "keys.toml"
        self.keys = {
            name: add_key(self.keys_file, name, is_admin=name == "root", tenant=name, expires=None)
            for name in ("root", "alice", "bob")
        }
        self._model = write_model_folder(folder / "oracle", config=FACTS)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._open: list[http.client.HTTPConnection] = []
        self.start("scheduler", "scheduler_svc")
        options = ["--step-ms", str(step_ms), "--num-blocks", str(blocks)]
        options += ["--num-cpu-blocks", str(cpu_blocks), *(["--null"] if is_null else [])]
        self._worker_options = options
        for number in range(1, workers + 1):
            self.start_worker(f"gpu-{number}")
        self.port = free_port()
        self.start_gateway(self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_worker(self, name: str) -> None:
        self.start(name, "tests.fakes.oracle_worker", name, *self._worker_options)

    def start_gateway(self, port: int, *, has_keys: bool = True) -> None:
        """Start a gateway, and wait until it serves."""
        sets = [
            f"--set=PORT={port}",
            f"--set=MODEL={self._model}",
            "--set=SERVED_MODEL_NAME=oracle",
        ]
        if has_keys:
            sets.append(f"--set=API_KEYS_FILE={self.keys_file}")
        self.start(f"gateway-{port}", "gateway", *sets)
        self.until(lambda: self._serves(port), "the gateway serves")

    def start(self, name: str, module: str, *arguments: str) -> None:
        """Start a process, again if it was killed."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PAGESTREAM_REDIS_URL": self.redis.url,
                    "PYTHONPATH": str(ROOT),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self, name: str) -> None:
        """End a process at once, as a crash would."""
        self._processes[name].kill()
        self._processes[name].wait()

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def begin(self, who: str, num_prompt_tokens: int, max_tokens: int, *, seed: int = 1) -> None:
        """Send a request whose answer is read by nobody; it runs until it ends, or `close`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        prompt = [(seed * 37 + i) % 900 for i in range(num_prompt_tokens)]
        body = {"prompt": prompt, "max_tokens": max_tokens, "seed": seed, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.keys[who]}"}
        connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
        self._open.append(connection)

    def hang_up(self) -> None:
        """Close the connections of all requests, so that they end."""
        for connection in self._open:
            connection.close()
        self._open.clear()

    def get(self, path: str, who: str = "root") -> Any:
        """Ask for JSON."""
        asked = urllib.request.Request(
            self.url + path, headers={"Authorization": f"Bearer {self.keys[who]}"}
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as reply:
            return json.load(reply)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Ask again and again; fails rather than hang."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"never: {what}\n{self.said()}"
            time.sleep(0.1)

    def said(self) -> str:
        """The end of what the processes wrote."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.stem}: {log.read_text()[-800:]}" for log in logs)

    def close(self) -> None:
        self.hang_up()
        for process in self._processes.values():
            process.kill()
            process.wait()
        self.redis.close()

    def _serves(self, port: int) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            headers = {"Authorization": f"Bearer {self.keys['root']}"}
            connection.request("GET", "/v1/models", headers=headers)
            card = json.load(connection.getresponse())["data"][0]
            connection.close()
        except (OSError, KeyError, ValueError):
            return False
        return card["max_model_len"] is not None


def main() -> None:
    """Run a pool with some load until interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=96)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stack = ConsoleStack(Path(folder), workers=options.workers, blocks=options.blocks)
        try:
            print(f"{stack.url}/console  {stack.keys}", flush=True)  # noqa: T201 - for a person
            number = 0
            while True:
                number += 1
                name = ("alice", "bob")[number % 2]
                stack.begin(name, 30 + 41 * number % 160, 120 + 67 * number % 500, seed=number)
                time.sleep(12 / options.load)
        except KeyboardInterrupt:
            return
        finally:
            stack.close()


if __name__ == "__main__":
    main()
