"""What the compiler makes of the loops that products spend their time in: no vector is spilled.

A compiler that leaves an array of sums in memory makes a product several times as slow, and a
change of a few words is enough for that. So the loops are looked at as they come out.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest

from gpu_worker.native import library

MACROS = {"DK": 64, "DV": 64, "MODEL_TYPE": "uint16_t"}


@dataclass(frozen=True)
class Processor:
    """One that has all that a form of the loops uses, whatever runs this."""

    lanes: int
    flags: tuple[str, ...]
    register: str
    products_of_a_row: int  # in a step of a loop


AVX512 = Processor(16, ("-march=cooperlake", "-mprefer-vector-width=512"), "zmm", 2)
AVX2 = Processor(8, ("-march=x86-64-v3",), "ymm", 4)
AVX_VNNI = Processor(8, ("-march=x86-64-v3", "-mavxvnni"), "ymm", 2)

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="loops of another processor"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]


def assembly(folder: Path, processor: Processor, weight_type: str) -> list[str]:
    """The decoder's, a line for each instruction or label."""
    source = str(resources.files("gpu_worker.native") / "decoder.cpp")
    macros = {**MACROS, "VL": processor.lanes, "WEIGHT_TYPE": weight_type}
    defines = (f"-D{name}={value}" for name, value in macros.items())
    made = folder / "decoder.s"
    command = ["g++", *library.FLAGS, *processor.flags, *defines, "-S", source, "-o", str(made)]
    subprocess.run(command, check=True)
    return [line.strip() for line in made.read_text().splitlines()]


def innermost_loops(lines: list[str]) -> Iterator[list[str]]:
    """Stretches from a label to a jump back to it that hold no other label."""
    label, begin = "", 0
    for i, line in enumerate(lines):
        if found := re.fullmatch(r"(\.L\w+):", line):
            label, begin = found[1], i
        elif re.fullmatch(rf"j\w+\s+{re.escape(label)}", line) and label:
            yield lines[begin + 1 : i]


# Of 6 and 7 rows of int8, GCC 12 keeps the weights on the stack, though there are registers. With
# AVX2 and 5 rows there is none left for the constant that takes bfloat16 apart.
@pytest.mark.parametrize(
    ("processor", "weight_type", "instruction", "rows"),
    [
        pytest.param(AVX512, "uint16_t", "vdpbf16ps", range(2, 13), id="AVX-512, bfloat16"),
        pytest.param(AVX512, "int8_t", "vpdpbusd", [2, 3, 4, 5, 8], id="AVX-512, int8"),
        pytest.param(AVX2, "uint16_t", "vfmadd", range(2, 6), id="AVX2, bfloat16"),
        pytest.param(AVX2, "int8_t", "vpmaddwd", range(2, 5), id="AVX2, int8"),
        pytest.param(AVX_VNNI, "int8_t", "{vex} vpdpbusd", range(2, 7), id="AVX-VNNI, int8"),
    ],
)
def test_loops_of_products_keep_everything_in_registers(
    tmp_path: Path,
    processor: Processor,
    weight_type: str,
    instruction: str,
    rows: Sequence[int],
) -> None:
    spilled: dict[float, int] = {}  # by rows of a pass: instructions with a vector on the stack
    stack = re.compile(rf"%r[sb]p\).*{processor.register}|{processor.register}.*%r[sb]p\)")
    for loop in innermost_loops(assembly(tmp_path, processor, weight_type)):
        num_products = sum(line.startswith(instruction) for line in loop)
        # Attention's ask for its keys by another instruction.
        if num_products and any(line.startswith("prefetcht0") for line in loop):
            num_rows = num_products / processor.products_of_a_row
            num_on_stack = sum(stack.search(line) is not None for line in loop)
            spilled[num_rows] = max(spilled.get(num_rows, 0), num_on_stack)
    allowed = {n: int(processor is AVX2 and n == 5) for n in rows}
    assert all(spilled[n] <= most for n, most in allowed.items()), spilled
