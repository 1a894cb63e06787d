"""Programs of others that talk to the stack, each in a place of its own under `build/clients`.

What they need must not meet what we need: one pins our libraries to other versions, another brings
gigabytes. Installed on first use, from the package indices that pip and npm are set up for.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.running_stack import ROOT

CACHE = ROOT / "build" / "clients"
INSTALL_S = 1500.0


def python_client(*requirements: str) -> Path:
    """The folder of programs of a virtual environment that holds these, the first by name."""
    folder = _folder(requirements[0].partition("==")[0], "\n".join((sys.version, *requirements)))
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        for requirement in reversed(requirements):  # what must not be chosen freely comes first
            _run([*pip, requirement])
        done.touch()
    return folder / "bin"


def node_client(source: Path) -> Path:
    """A copy of a folder with a package.json and its lock, with what these ask for."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    files = sorted(path for path in source.iterdir() if path.is_file())
    folder = _folder(source.name, "\n".join(path.read_text() for path in files))
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in files:
            shutil.copy(path, folder)
        _run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], folder)
        done.touch()
    return folder


def _folder(name: str, content: str) -> Path:
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return CACHE / f"{name}-{digest}"


def _run(command: list[str], folder: Path = ROOT) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=INSTALL_S
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
