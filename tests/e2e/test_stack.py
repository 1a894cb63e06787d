"""The whole stack on one machine, as a person starts it: real processes, a real model."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.running_stack import PAGESTREAM, ROOT, RunningStack

pytestmark = pytest.mark.e2e

PROMPT = "The capital of France is"


@pytest.fixture(autouse=True)
def _a_hangup_is_heard() -> Iterator[None]:
    """Under `nohup` it is not, here and in every child."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def start(tmp_path: Path, models: Path) -> Iterator[Callable[..., RunningStack]]:
    started: list[RunningStack] = []

    def run(*command: str) -> RunningStack:
        started.append(
            RunningStack(list(command or (*PAGESTREAM, "up")), tmp_path / "data", models)
        )
        return started[-1]

    yield run
    for one in started:
        one.close()


def test_each_service_may_be_killed_and_it_serves_again(start: Callable[..., RunningStack]) -> None:
    up = start()
    up.wait_ready()
    answer = up.complete(PROMPT)
    assert "Paris" in answer
    for role in ("worker", "scheduler", "gateway", "redis"):
        before = up.pids()[role]
        assert before is not None
        os.kill(before, signal.SIGKILL)
        up.wait_replaced(role, before)
        assert up.complete(PROMPT) == answer, role

    again = up.run("up")
    assert again.returncode == 2
    assert f"DATA_DIR={up.data_dir}: `pagestream up` runs there already" in again.stderr

    up.process.send_signal(signal.SIGTERM)
    assert up.wait_end() == 0
    assert up.leftovers() == []


def test_gateways_share_the_port_and_workers_the_requests(
    start: Callable[..., RunningStack],
) -> None:
    up = start(*PAGESTREAM, "up", "--gateways", "2", "--workers", "2")
    up.wait_ready()
    assert "Paris" in up.complete(PROMPT)

    def are_all_seen() -> bool:
        seen = json.loads(up.run("ps", "--json").stdout)["processes"]
        roles = sorted(one["role"] for one in seen)
        return roles == ["gateway", "gateway", "redis", "scheduler", "worker", "worker"]

    up.wait_until(are_all_seen, "two gateways and two workers")
    assert up.run("down").returncode == 0
    assert up.wait_end() == 0
    assert up.leftovers() == []


@pytest.mark.long
def test_a_rolling_restart_replaces_every_process_and_redis(
    start: Callable[..., RunningStack],
) -> None:
    up = start(*PAGESTREAM, "up", "--gateways", "2")
    up.wait_ready()
    answer = up.complete(PROMPT)

    def lives() -> set[tuple[str, int]]:
        seen = json.loads(up.run("ps", "--json").stdout)["processes"]
        return {(one["role"], one["pid"]) for one in seen}

    up.wait_until(lambda: len(lives()) == 5, "two gateways and the rest")
    before = lives()
    command = [sys.executable, ROOT / "deploy" / "rolling-restart", "--redis"]
    command += ["--ps", f"{shlex.join(PAGESTREAM)} ps --json"]
    restarting = subprocess.Popen(command, env=up.environ, stdout=subprocess.PIPE, text=True)
    num_answers = 0
    while restarting.poll() is None:
        assert up.complete(PROMPT) == answer
        num_answers += 1
    said, _ = restarting.communicate()
    assert restarting.returncode == 0, said
    assert said.count("restarting") == 5
    assert num_answers
    up.wait_until(lambda: len(lives()) == 5, "all of them again")
    assert not lives() & before
    assert up.complete(PROMPT) == answer


def test_killing_up_leaves_no_service_behind(start: Callable[..., RunningStack]) -> None:
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
    number: signal.Signals, to_group: bool, start: Callable[..., RunningStack]
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
