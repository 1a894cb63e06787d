"""The whole stack on one machine, as a person starts it: real processes, a real model."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
PAGESTREAM = (sys.executable, "-P", "-m", "pagestream")
PATIENCE_S = 120.0
PROMPT = "The capital of France is"


class Up:
    """A stack that was started with some command; its processes are known by their environment."""

    def __init__(self, command: list[str], data_dir: Path, models: Path) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.environ = os.environ | {
            "PAGESTREAM_DATA_DIR": str(data_dir),
            "PAGESTREAM_PORT": str(self.port),
            "PAGESTREAM_MODEL_CACHE_DIR": str(models),
            "PAGESTREAM_DRAIN_TIMEOUT_S": "10",
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
        line = self.process.stdout.readline()
        assert line == f"ready http://127.0.0.1:{self.port}\n", self.errors.read_text()[-2000:]

    def wait_said(self, text: str) -> None:
        """Wait until standard error has this."""
        while text not in self.errors.read_text():
            assert self.process.poll() is None, self.errors.read_text()[-2000:]
            time.sleep(0.05)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line beside it."""
        return subprocess.run(
            [*PAGESTREAM, *arguments],
            env=self.environ,
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

    def complete(self) -> str:
        """The model's greedy answer; a gateway that is away or not ready is asked again."""
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 5, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                    answer: dict[str, Any] = json.load(reply)
                    return str(answer["choices"][0]["text"])
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
        self.process.communicate()
        for process in self.leftovers():
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the converted model, so that it is converted once."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def start(tmp_path: Path, models: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def run(*command: str) -> Up:
        started.append(Up(list(command or (*PAGESTREAM, "up")), tmp_path / "data", models))
        return started[-1]

    yield run
    for one in started:
        one.close()


def test_each_service_may_be_killed_and_it_serves_again(start: Callable[..., Up]) -> None:
    up = start()
    up.wait_ready()
    answer = up.complete()
    assert "Paris" in answer
    for role in ("worker", "scheduler", "gateway", "redis"):
        before = up.pids()[role]
        assert before is not None
        os.kill(before, signal.SIGKILL)
        while up.pids().get(role) in (None, before):
            time.sleep(0.3)
        assert up.complete() == answer, role

    again = up.run("up")
    assert again.returncode == 2
    assert f"DATA_DIR={up.data_dir}: `pagestream up` runs there already" in again.stderr

    up.process.send_signal(signal.SIGTERM)
    assert up.wait_end() == 0
    assert up.leftovers() == []


def test_gateways_share_the_port_and_workers_the_requests(start: Callable[..., Up]) -> None:
    up = start(*PAGESTREAM, "up", "--gateways", "2", "--workers", "2")
    up.wait_ready()
    assert "Paris" in up.complete()
    seen = json.loads(up.run("ps", "--json").stdout)["processes"]
    roles = sorted(one["role"] for one in seen)
    assert roles == ["gateway", "gateway", "redis", "scheduler", "worker", "worker"]
    assert up.run("down").returncode == 0
    assert up.wait_end() == 0
    assert up.leftovers() == []


def test_killing_up_leaves_no_service_behind(start: Callable[..., Up]) -> None:
    up = start()
    up.wait_ready()
    up.process.kill()
    up.wait_end()
    assert up.leftovers() == []
    second = start()  # neither its lock nor its socket is in the way
    second.wait_said("scheduler: leader")
    second.process.send_signal(signal.SIGINT)  # and a signal while it loads is obeyed
    assert second.wait_end() == 0
    assert second.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("to_group", [False, True], ids=["make alone", "the group"])
def test_a_signal_to_make_stops_the_stack_in_order(
    number: signal.Signals, to_group: bool, start: Callable[..., Up]
) -> None:
    up = start("make", "--silent", "up")
    up.wait_said("scheduler: leader")
    if to_group:
        os.killpg(up.process.pid, number)
    else:
        up.process.send_signal(number)
    assert up.wait_end() == -number
    assert up.leftovers() == []
    assert up.errors.read_text().rstrip().endswith("stopped")
