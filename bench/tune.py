"""Looks for the best tiles on this GPU and writes them to kernels/configs/<arch>.json.

Run on a machine with a GPU: python -m bench.tune [HEAD_DIM GROUP …]. First everything is compiled,
by as many processes as there are cores, then it is measured. A worker takes what it finds
there before the rules of `kernels.heuristics`. The size of the pieces of a sequence is not tuned:
it decides how sums are rounded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from kernels import heuristics
from kernels.decode_attention import attend_decodes
from kernels.decode_plan import plan_decodes
from kernels.heuristics import DecodeConfig, PrefillConfig, shape_of
from kernels.paged_cache import PagedCache
from kernels.prefill_attention import attend_ragged
from kernels.target import arch

KV_HEADS = 8
SHAPES = ((128, 4), (128, 8), (64, 3), (64, 8), (256, 2))  # head size, query heads of a key head

TOO_MUCH = (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError)

DECODE = [
    DecodeConfig(tile, warps, stages, programs)
    for tile, warps, stages, programs in product((32, 64, 128), (4, 8), (2, 3, 4), (2, 4))
]
PREFILL = [
    PrefillConfig(block_m, tile, warps, stages)
    for block_m, tile, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3))
]


def milliseconds(run: Callable[[], object]) -> float:
    """Time of a call; infinite where a configuration does not fit the device."""
    try:
        return float(triton.testing.do_bench(run, warmup=5, rep=20, return_mode="median"))
    except TOO_MUCH:
        return float("inf")


class Bench:
    """One shape of a model in bfloat16, to be run with any configuration."""

    def __init__(
        self, head_dim: int, group: int, device: torch.device, num_seqs: int, length: int
    ) -> None:
        blocks = num_seqs * -(-length // 16)
        pool = torch.randn(blocks, KV_HEADS, 16, head_dim, device=device).to(torch.bfloat16)
        self.cache = PagedCache(pool, pool.flip(0))
        self.tables = torch.randperm(blocks).int().view(num_seqs, -1).to(device)
        self.lens = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
        self.plan = plan_decodes(np.full(num_seqs, length), device)
        self.starts = torch.tensor([0, length], dtype=torch.int32, device=device)
        shape = (KV_HEADS * group, head_dim)
        self.single = torch.randn(num_seqs, *shape, device=device).to(torch.bfloat16)
        self.several = torch.randn(length, *shape, device=device).to(torch.bfloat16)

    @property
    def key(self) -> str:
        """Of an entry in `configs/<arch>.json`, after the phase."""
        return shape_of(self.single, self.cache).key

    def decode(self, config: DecodeConfig) -> Tensor:
        """All sequences, one token each."""
        operands = (self.single, self.cache, self.tables, self.plan)
        return attend_decodes(*operands, scale=0.1, config=config)

    def prefill(self, config: PrefillConfig) -> Tensor:
        """One sequence, all of its tokens."""
        operands = (self.several, self.cache, self.tables[:1], self.starts, self.lens[:1])
        return attend_ragged(*operands, scale=0.1, config=config)


def best(
    configs: Iterable[Any], run: Callable[[Any], object], measure: Callable[..., float]
) -> tuple[Any, float]:
    """The fastest configuration, and its time."""
    times = [(measure(lambda config=config: run(config)), config) for config in configs]
    time, config = min(times, key=lambda pair: pair[0])
    return config, time


def tune(
    head_dim: int,
    group: int,
    device: torch.device,
    *,
    measure: Callable[..., float] = milliseconds,
    num_seqs: int = 32,
    length: int = 4096,
) -> dict[str, dict[str, int]]:
    """Entries of `configs/<arch>.json` for one shape of a model."""
    bench = Bench(head_dim, group, device, num_seqs, length)
    entries = {}
    for phase, configs, run in (
        ("decode", DECODE, bench.decode),
        ("prefill", PREFILL, bench.prefill),
    ):
        config, time = best(configs, run, measure)
        print(f"{phase}-{bench.key}: {config}, {time * 1e3:.0f} us", flush=True)
        entries[f"{phase}-{bench.key}"] = asdict(config)
    return entries


def compile_share(
    share: int, num_shares: int, shapes: Iterable[tuple[int, int]], device: torch.device
) -> None:
    """Have some of all configurations compiled, into the cache on disk."""
    for head_dim, group in shapes:
        bench = Bench(head_dim, group, device, num_seqs=2, length=1024)
        runs = [partial(bench.decode, config) for config in DECODE]
        runs += [partial(bench.prefill, config) for config in PREFILL]
        for run in runs[share::num_shares]:
            with suppress(*TOO_MUCH):
                run()


def compile_all(shapes: Iterable[tuple[int, int]]) -> None:
    """Have all configurations compiled by processes beside this one."""
    num_shares = os.cpu_count() or 1
    numbers = [str(number) for shape in shapes for number in shape]
    commands = (
        [sys.executable, "-m", "bench.tune", "--share", str(share), str(num_shares), *numbers]
        for share in range(num_shares)
    )
    for process in [subprocess.Popen(command) for command in commands]:
        process.wait()


def write(entries: dict[str, dict[str, int]], path: Path) -> None:
    """Add entries to a file, or replace them there."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(known | entries, indent=1, sort_keys=True) + "\n")


def main(arguments: list[str]) -> None:
    """Tune the shapes of the command line, or the usual ones."""
    if not torch.cuda.is_available():
        sys.exit("bench/tune.py needs a GPU")
    device = torch.device("cuda")
    is_share = arguments[:1] == ["--share"]
    share = [int(argument) for argument in arguments[1:3]] if is_share else []
    numbers = [int(argument) for argument in (arguments[3:] if is_share else arguments)]
    shapes = list(zip(numbers[::2], numbers[1::2], strict=True)) or list(SHAPES)
    if is_share:
        compile_share(*share, shapes, device)
        return
    compile_all(shapes)
    for head_dim, group in shapes:
        write(tune(head_dim, group, device), heuristics.CONFIGS / f"{arch(device)}.json")


if __name__ == "__main__":
    main(sys.argv[1:])
