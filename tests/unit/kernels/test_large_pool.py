"""A pool of more than 2^31 numbers is addressed rightly by every kernel that sees one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_offsets_in_a_large_pool() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.large_pool"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
