"""No kernel computes an address that it must not touch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("where", ["large_pool", "edge_of_memory"])
def test_kernels_stay_within_their_operands(where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.bounds_of_memory", where],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
