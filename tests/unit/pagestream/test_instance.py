"""One stack a data folder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagestream import instance
from wire.config import SettingsError

HOLDER = """
import signal, sys
from pathlib import Path
from pagestream import instance

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with instance.claim(Path(sys.argv[1])):
    print("held", flush=True)
    signal.sigwait([signal.SIGTERM])
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_folder_is_held_once(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(SettingsError, match=f"runs there already.*{holder.pid}"):
        instance.claim(tmp_path).__enter__()
    assert instance.running(tmp_path) == holder.pid
    assert instance.stop(tmp_path) == holder.pid
    assert holder.wait() == 0


def test_a_folder_is_free_once_its_holder_was_killed(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / "up.pid").read_text() == f"{holder.pid}\n"
    assert instance.running(tmp_path) is None
    with instance.claim(tmp_path):
        assert (tmp_path / "up.pid").read_text() == f"{os.getpid()}\n"


def test_stopping_nothing_is_harmless(tmp_path: Path) -> None:
    (tmp_path / "up.pid").write_text(f"{os.getpid()}\n")  # stale, and somebody else's by now
    assert instance.stop(tmp_path) is None
    assert instance.stop(tmp_path / "missing") is None


def test_the_folder_is_made_for_its_owner_only(tmp_path: Path) -> None:
    with instance.claim(tmp_path / "new"):
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_is_a_bad_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"DATA_DIR=.*file"):
        instance.claim(tmp_path / "file").__enter__()
