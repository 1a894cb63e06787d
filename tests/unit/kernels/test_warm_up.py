"""Nothing is compiled while clients wait: all that serving launches was launched before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_serving_launches_no_variant_that_warming_up_did_not() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.launches_of_a_worker", "llama", "gemma3"],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"llama": [], "gemma3": []}
