"""Compiles a C++ source of this folder on this machine, once, and keeps what came out.

Owns the folder of compiled libraries. What is in it depends on the sources, the compiler, the flags
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

FLAGS = ("-O3", "-std=c++17", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
AVX2 = frozenset({"avx2", "fma"})
"""Features of a processor that has vectors of 8 floats, as the decoder uses them."""

_COMPILE_TIMEOUT_S = 120


class NoLibraryError(Exception):
    """The kernel cannot be had here; the text says why."""


def load(name: str, cache_dir: Path, **defines: str | int) -> ctypes.CDLL:
    """Compile `name`.cpp with these macros, or take what an earlier start compiled.

    The head sizes of attention are DK for keys and DV for values.

    Raises:
        NoLibraryError: there is no compiler, or it fails.

    """
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        raise NoLibraryError("no C++ compiler (Debian package g++) is installed")
    lanes, vector_flags = _vectors()
    value_dim = int(defines.get("DV", lanes))
    if value_dim % lanes:
        raise NoLibraryError(f"head size {value_dim} is no multiple of {lanes}")
    macros = {**defines, "VL": lanes}
    flags = [*FLAGS, *vector_flags, *(f"-D{name}={value}" for name, value in macros.items())]
    sources = _sources()
    library = cache_dir / f"{name}-{_digest(sources, flags, compiler)}.so"
    if not library.exists():
        _compile(compiler, flags, sources, f"{name}.cpp", library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoLibraryError(f"{library}: {error}") from None


def processor_features() -> set[str]:
    """What the kernel says of the processor; empty where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return set(flags.partition(":")[2].split())


def _vectors() -> tuple[int, list[str]]:
    """Floats in a vector register of this processor, and the flags that let the compiler use it."""
    features = processor_features()
    if "avx512f" in features:
        return 16, ["-march=native", "-mprefer-vector-width=512"]
    if features >= AVX2:
        return 8, ["-march=x86-64-v3", *(["-mavxvnni"] if "avx_vnni" in features else [])]
    return 4, []


def _sources() -> dict[str, str]:
    """Every C++ file of this folder, by name."""
    files = resources.files("gpu_worker.native").iterdir()
    found = {f.name: f.read_text("utf-8") for f in files if f.name.endswith((".h", ".cpp"))}
    return dict(sorted(found.items()))


def _digest(sources: dict[str, str], flags: list[str], compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    features = sorted(processor_features())
    parts = (*sources.values(), *flags, version, platform.machine(), *features)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _compile(
    compiler: str, flags: list[str], sources: dict[str, str], main: str, library: Path
) -> None:
    """Compile beside the target and rename, so that nobody ever loads half a file."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        for name, text in sources.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        made = Path(folder) / "made.so"
        command = [compiler, *flags, str(Path(folder) / main), "-o", str(made)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoLibraryError(f"{compiler}: {error}") from None
        if done.returncode != 0:
            raise NoLibraryError(f"{compiler} failed: {done.stderr[-500:]}")
        made.replace(library)
