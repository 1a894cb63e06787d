"""What the compiler makes of the loops that products spend their time in: no vector is spilled.

A compiler that leaves an array of sums in memory makes a product several times as slow, and a
change of a few words is enough for that. So the loops are looked at as they come out.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from gpu_worker.native import library

# A processor that has all that the vector loops use, whatever runs this.
PROCESSOR = ("-march=cooperlake", "-mprefer-vector-width=512")
MACROS = {"VL": 16, "DK": 64, "DV": 64, "MODEL_TYPE": "uint16_t"}

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="loops of another processor"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]


def assembly(folder: Path, weight_type: str) -> list[str]:
    """The decoder's, a line for each instruction or label."""
    source = str(resources.files("gpu_worker.native") / "decoder.cpp")
    macros = {**MACROS, "WEIGHT_TYPE": weight_type}
    flags = (*library.FLAGS, *PROCESSOR, *(f"-D{name}={value}" for name, value in macros.items()))
    made = folder / "decoder.s"
    subprocess.run(["g++", *flags, "-S", source, "-o", str(made)], check=True)
    return [line.strip() for line in made.read_text().splitlines()]


def innermost_loops(lines: list[str]) -> Iterator[list[str]]:
    """Stretches from a label to a jump back to it that hold no other label."""
    label, begin = "", 0
    for i, line in enumerate(lines):
        if found := re.fullmatch(r"(\.L\w+):", line):
            label, begin = found[1], i
        elif re.fullmatch(rf"j\w+\s+{re.escape(label)}", line) and label:
            yield lines[begin + 1 : i]


# Of 6 and 7 rows of int8, GCC 12 keeps the weights on the stack, though there are registers.
@pytest.mark.parametrize(
    ("weight_type", "instruction", "rows"),
    [("uint16_t", "vdpbf16ps", range(2, 13)), ("int8_t", "vpdpbusd", [2, 3, 4, 5, 8])],
)
def test_loops_of_products_keep_everything_in_registers(
    tmp_path: Path, weight_type: str, instruction: str, rows: range | list[int]
) -> None:
    spilled: dict[int, int] = {}  # by rows of a pass: instructions with a vector on the stack
    for loop in innermost_loops(assembly(tmp_path, weight_type)):
        num_products = sum(line.startswith(instruction) for line in loop)
        if num_products and any(line.startswith("prefetch") for line in loop):
            on_stack = [line for line in loop if "zmm" in line and re.search(r"%r[sb]p\)", line)]
            num_rows = num_products // 2  # each takes two vectors of weights
            spilled[num_rows] = max(spilled.get(num_rows, 0), len(on_stack))
    assert {n: spilled.get(n) for n in rows} == dict.fromkeys(rows, 0)
