"""Every kernel compiles for every GPU, without a GPU, into what its design counts on.

Registers and shared memory are held against `budget.json`, by version of Triton; they decide how
many programs run at once. To write what is measured there: UPDATE_KERNEL_BUDGET=1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import triton

BUDGET = Path(__file__).parent / "budget.json"
ARCHITECTURES = ("sm_90", "sm_80", "sm_100", "gfx942")
ROOT = Path(__file__).parents[3]
SPARE_REGISTERS = 16

Figures = dict[str, dict[str, int]]

pytestmark = pytest.mark.aot


def compiled(arch: str, cache: Path) -> Figures:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.unit.kernels.ahead_of_time", arch]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest) -> dict[str, Figures]:
    """By architecture. Compiled results are kept between runs."""
    cache = request.config.cache.mkdir("triton")
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda arch: compiled(arch, cache), ARCHITECTURES)
        measured = dict(zip(ARCHITECTURES, results, strict=True))
    if os.environ.get("UPDATE_KERNEL_BUDGET"):
        budgets = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
        budgets[triton.__version__] = {
            arch: {
                kernel: {name: found[name] for name in ("registers", "shared", "spills")}
                for kernel, found in kernels.items()
            }
            for arch, kernels in measured.items()
        }
        BUDGET.write_text(json.dumps(budgets, indent=1) + "\n")
    return measured


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_stay_in_their_budget(figures: dict[str, Figures], arch: str) -> None:
    budgets = json.loads(BUDGET.read_text())
    over = []
    for kernel, found in figures[arch].items():
        if triton.__version__ in budgets:
            allowed = budgets[triton.__version__][arch][kernel]
        else:  # registers are that version's own affair
            spills = max(of_version[arch][kernel]["spills"] for of_version in budgets.values())
            allowed = {"registers": 512, "shared": 232448, "spills": spills}
        over += [
            f"{kernel}: {name} {found[name]}, allowed {allowed[name]}"
            for name, spare in (("registers", SPARE_REGISTERS), ("shared", 0), ("spills", 0))
            if found[name] > allowed[name] + spare
        ]
    assert not over, "\n".join(over)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_attention_brings_keys_and_values_16_bytes_at_a_time(
    figures: dict[str, Figures], arch: str
) -> None:
    attention = {
        kernel: found["async_copies_16_bytes"]
        for kernel, found in figures[arch].items()
        if kernel.endswith((" _decode", " _prefill"))
    }
    assert attention
    assert all(attention.values()), attention


def test_prefill_uses_the_matrix_units_of_hopper(figures: dict[str, Figures]) -> None:
    prefill = {
        kernel: found["wgmma"]
        for kernel, found in figures["sm_90"].items()
        if kernel.endswith(" _prefill") and "float32" not in kernel
    }
    assert prefill
    assert all(prefill.values()), prefill


def test_float32_is_multiplied_exactly(figures: dict[str, Figures]) -> None:
    """Not in tf32, which is what a matrix unit would do."""
    for kernel, found in figures["sm_90"].items():
        if "float32" in kernel and not kernel.endswith(" _reduce"):
            assert found["wgmma"] == 0
            assert found["fused_multiply_adds"] > 500
