"""Compiles cpu.cpp for one head size on this machine, once, and keeps what came out.

Owns the folder of compiled libraries. What is in it depends on the source, the compiler, the flags
and the processor, all of which are in the name of a file.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

_FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120


class NoLibraryError(Exception):
    """The kernel cannot be had here; the text says why."""


def load(key_dim: int, value_dim: int, cache_dir: Path) -> ctypes.CDLL:
    """Compile the kernel for these head sizes, or take what an earlier start compiled.

    Raises:
        NoLibraryError: there is no compiler, or it fails.

    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise NoLibraryError("no C++ compiler (Debian package g++) is installed")
    lanes, vector_flags = _vectors()
    if value_dim % lanes:
        raise NoLibraryError(f"head size {value_dim} is no multiple of {lanes}")
    source = resources.files("gpu_worker.attention").joinpath("cpu.cpp").read_text(encoding="utf-8")
    flags = [*_FLAGS, *vector_flags, f"-DDK={key_dim}", f"-DDV={value_dim}", f"-DVL={lanes}"]
    library = cache_dir / f"attention-{_digest(source, flags, compiler)}.so"
    if not library.exists():
        _compile(compiler, flags, source, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoLibraryError(f"{library}: {error}") from None


def _vectors() -> tuple[int, list[str]]:
    """Floats in a vector register of this processor, and the flags that let the compiler use it."""
    features = _cpu_features()
    if "avx512f" in features:
        return 16, ["-march=native", "-mprefer-vector-width=512"]
    if {"avx2", "fma"} <= features:
        return 8, ["-march=native"]
    return 4, []


def _cpu_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def _digest(source: str, flags: list[str], compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    features = sorted(_cpu_features())
    parts = (source, *flags, version, platform.machine(), *features)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _compile(compiler: str, flags: list[str], source: str, library: Path) -> None:
    """Compile beside the target and rename, so that nobody ever loads half a file."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / "made.so"
        command = [compiler, *flags, "-x", "c++", "-", "-o", str(made)]
        try:
            done = subprocess.run(
                command,
                input=source,
                capture_output=True,
                text=True,
                check=False,
                timeout=_COMPILE_TIMEOUT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoLibraryError(f"{compiler}: {error}") from None
        if done.returncode != 0:
            raise NoLibraryError(f"{compiler} failed: {done.stderr[-500:]}")
        made.replace(library)
