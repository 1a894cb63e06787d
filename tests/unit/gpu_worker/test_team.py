"""Threads that go through phases: who is there does each item once, after the phase before."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest

from gpu_worker.native import library

NUM_PHASES = 300
PATIENCE_S = 30.0

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("phases") / "phases.so"
    source = Path(__file__).with_name("phases.cpp")
    folder = str(resources.files("gpu_worker.native"))
    command = ["g++", *library.FLAGS, "-I", folder, str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(made))
    loaded.run_phases.restype = loaded.leave.restype = ctypes.c_int64
    return loaded


@pytest.mark.parametrize("are_small", [False, True])
@pytest.mark.parametrize("num_items", [0, 1, 2, 3, 40])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_each_item_is_done_once_and_after_the_phase_before(
    phases: ctypes.CDLL, num_threads: int, num_items: int, are_small: bool
) -> None:
    times = (ctypes.c_int64 * (NUM_PHASES * num_items))()
    sizes = map(ctypes.c_int64, (num_threads, NUM_PHASES, num_items))
    assert phases.run_phases(*sizes, ctypes.c_bool(are_small), times) == 0
    assert set(times) <= {1}


@pytest.mark.parametrize("leaves", [0, 7])
def test_who_lost_its_core_between_two_items_holds_up_nobody(
    phases: ctypes.CDLL, leaves: int
) -> None:
    """It finds the phases that it missed done, and does nothing of them again."""
    sizes = map(ctypes.c_int64, (leaves, NUM_PHASES, 6))
    assert phases.leave(*sizes, ctypes.c_double(PATIENCE_S)) == 0
