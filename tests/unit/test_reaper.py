"""What a test has started ends with the tests, however those end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]

TESTS = r"""
import subprocess, sys, time
from pathlib import Path
from tests.fakes.redis_server import KINDS, RedisServer, find_binary

def test_starts_and_hangs(tmp_path):
    servers = [RedisServer(kind) for kind in KINDS if find_binary(kind)]
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    starting = f"import subprocess as s; print(s.Popen({sleeping!r}, stdout=s.DEVNULL).pid)"
    kept = subprocess.Popen(sleeping, start_new_session=True)
    daemon = subprocess.check_output([sys.executable, "-c", starting], start_new_session=True)
    pids = [kept.pid, int(daemon), *(server.pid for server in servers)]
    Path("pids").write_text(" ".join(map(str, pids)) + "\n")
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_test_has_started_ends_with_the_tests(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    conftest = "from tests.conftest import pytest_configure as pytest_configure\n"
    (tmp_path / "conftest.py").write_text(conftest)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "test_it.py"]
    tests = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    pids = tmp_path / "pids"
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert tests.poll() is None
    started = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    tests.send_signal(number)
    tests.wait(timeout=60)
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive
