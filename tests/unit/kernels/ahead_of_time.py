"""Compiles what the launchers launch, for GPUs that are not there, and reads what came out.

Run as a process of its own: `python -m tests.unit.kernels.ahead_of_time ARCH` prints one JSON
object. A launcher runs on small tensors of the CPU up to the launch, which is noted instead:
so what is compiled has the very arguments, constants and options that a GPU would get. Figures are
kept beside Triton's own cache, by what they were made from.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels import heuristics
from tests.unit.kernels.compiled_cases import CASES

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "gfx942": 304}
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_POINTERS = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
    "float8_e4m3fnuz": "*fp8e4b8",
    "float8_e5m2fnuz": "*fp8e5b16",
    "int64": "*i64",
    "int32": "*i32",
    "int16": "*i16",
    "uint8": "*u8",
    "bool": "*i1",
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One launch that did not happen."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, Any]


class Recorder:
    """Notes launches while it is entered, and lets launchers believe that they may launch."""

    def __init__(self) -> None:
        self.launches: list[Recorded] = []

    def __enter__(self) -> Recorder:
        self._run = JITFunction.run
        recorder = self

        def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
            arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
            recorder.launches.append(Recorded(self, arguments, options))

        JITFunction.run = record
        triton.knobs.propagate_env = False
        triton.knobs.runtime.interpret = True
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self._run
        triton.knobs.runtime.interpret = False


def source_of(launch: Recorded) -> ASTSource:
    """What the just-in-time compiler would make of a launch."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind, is_constant, is_aligned = _specialised(parameter, value)
        signature[parameter.name] = kind
        if is_constant:
            constants[place,] = value
        if is_aligned:
            attributes[place,] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def _specialised(parameter: Any, value: Any) -> tuple[str, bool, bool]:
    """Type, whether it is a constant, and whether it is known to be a multiple of 16."""
    if parameter.is_constexpr or value is None:
        return "constexpr", True, False
    if hasattr(value, "data_ptr"):
        kind = _POINTERS[str(value.dtype).removeprefix("torch.")]
        return kind, False, not parameter.do_not_specialize_on_alignment
    if isinstance(value, float):
        return "fp32", False, False
    kind = parameter.annotation_type or "i32"
    if parameter.do_not_specialize:
        return kind, False, False
    if value == 1:
        return "constexpr", True, False
    return kind, False, value % 16 == 0


def figures_of(launch: Recorded, arch: str) -> dict[str, int]:
    """Compile a launch and read registers, shared memory, spills and instructions of the result."""
    compiled = triton.compile(source_of(launch), target=TARGETS[arch], options=launch.options)
    kept = Path(os.environ["TRITON_CACHE_DIR"]) / f"figures-{compiled.hash}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    read = _read_amd if arch.startswith("gfx") else _read_nvidia
    figures = {"shared": compiled.metadata.shared, **read(compiled.asm)}
    kept.write_text(json.dumps(figures))
    return figures


def _read_nvidia(asm: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        code = _output("nvdisasm", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return {
        "registers": int(registers[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "wgmma": len(re.findall(r"\bHGMMA\b", code)),
        "async_copies_16_bytes": len(re.findall(r"\bLDGSTS\.E\.BYPASS\.[\w.]*128", code)),
        "fused_multiply_adds": len(re.findall(r"\bFFMA\b", code)),
    }


def _read_amd(asm: Any) -> dict[str, int]:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", asm["amdgcn"])
        return int(found[1]) if found else 0

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count"),
        "matrix_multiplies": len(re.findall(r"v_mfma\w+", asm["amdgcn"])),
    }


def _output(tool: str, *arguments: str) -> str:
    command = [str(_TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_all(arch: str) -> dict[str, dict[str, int]]:
    """Figures of every kernel of every case, by "<case> <kernel>"."""
    heuristics.arch = lambda _device: arch
    heuristics.num_multiprocessors = lambda _device: _MULTIPROCESSORS[arch]
    results = {}
    for name, case in CASES.items():
        with Recorder() as recorder:
            case(arch)
        for launch in recorder.launches:
            results[f"{name} {launch.kernel.__name__}"] = figures_of(launch, arch)
    return results


if __name__ == "__main__":
    json.dump(compile_all(sys.argv[1]), sys.stdout)
