"""On a build server nothing is skipped but what needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import pytest

@pytest.mark.skip(reason="no server")
def test_skipped(): ...

@pytest.mark.gpu
@pytest.mark.skip(reason="no GPU")
def test_without_gpu(): ...

@pytest.mark.xfail(reason="known")
def test_expected_to_fail():
    assert False
"""


def summary_of(tests: str, folder: Path, ci: str) -> str:
    """Run these tests in a pytest of their own; returns its last line."""
    (folder / "test_it.py").write_text(tests)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.skips",
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    command += ["-p", "no:cacheprovider", "--noconftest", f"--rootdir={folder}", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, "CI": ci}
    )
    return done.stdout.strip().splitlines()[-1]


def test_a_skip_fails_on_a_build_server_unless_a_gpu_is_missing(tmp_path: Path) -> None:
    assert "1 skipped, 1 xfailed, 1 error" in summary_of(TESTS, tmp_path, ci="true")


def test_elsewhere_a_skip_is_a_skip(tmp_path: Path) -> None:
    assert "2 skipped, 1 xfailed" in summary_of(TESTS, tmp_path, ci="")


@pytest.mark.parametrize(("ci", "expected"), [("true", "1 error"), ("", "1 skipped")])
def test_a_module_that_skips_itself_is_judged_alike(ci: str, expected: str, tmp_path: Path) -> None:
    module = "import pytest; pytest.skip('no package', allow_module_level=True)"
    assert expected in summary_of(module, tmp_path, ci)
