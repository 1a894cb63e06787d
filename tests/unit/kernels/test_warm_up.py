"""Nothing is compiled while clients wait: all that serving launches was launched before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def unseen(*arguments: str) -> dict[str, list[str]]:
    """Variants of kernels that serving launches first."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.kernels.launches_of_a_worker", *arguments],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_serving_launches_no_variant_that_warming_up_did_not() -> None:
    assert unseen("llama", "gemma3") == {"llama": [], "gemma3": []}


def test_after_one_small_request_it_would() -> None:
    variants = " ".join(unseen("--little", "llama")["llama"])
    assert "_prefill" in variants, "fewer tokens: smaller blocks of rows"
    assert "_sample" in variants, "logits that a rule has changed: other numbers"
