"""Looks for the best tiles on this GPU and writes them to kernels/configs/<arch>.json.

Run on a machine with a GPU: python bench/tune.py [HEAD_DIM GROUP …]. A worker takes what it finds
there before the rules of `kernels.heuristics`. The size of the pieces of a sequence is not tuned:
it decides how sums are rounded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
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
        return float(triton.testing.do_bench(run, warmup=20, rep=60, return_mode="median"))
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError):
        return float("inf")


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
    """Entries of `configs/<arch>.json` for one shape of a model in bfloat16."""
    blocks = num_seqs * -(-length // 16)
    pool = torch.randn(blocks, KV_HEADS, 16, head_dim, device=device).to(torch.bfloat16)
    cache = PagedCache(pool, pool.flip(0))
    tables = torch.randperm(blocks).int().view(num_seqs, -1).to(device)
    lens = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
    plan = plan_decodes(np.full(num_seqs, length), device)

    def queries(num_tokens: int) -> Tensor:
        shape = (num_tokens, KV_HEADS * group, head_dim)
        return torch.randn(shape, device=device).to(torch.bfloat16)

    single, several = queries(num_seqs), queries(length)
    starts = torch.tensor([0, length], dtype=torch.int32, device=device)

    def decode(config: DecodeConfig) -> Tensor:
        return attend_decodes(single, cache, tables, plan, scale=0.1, config=config)

    def prefill(config: PrefillConfig) -> Tensor:
        operands = (several, cache, tables[:1], starts, lens[:1])
        return attend_ragged(*operands, scale=0.1, config=config)

    key = shape_of(single, cache).key
    entries = {}
    for phase, configs, run in (("decode", DECODE, decode), ("prefill", PREFILL, prefill)):
        config, time = best(configs, run, measure)
        print(f"{phase}-{key}: {config}, {time * 1e3:.0f} us", flush=True)
        entries[f"{phase}-{key}"] = asdict(config)
    return entries


def write(entries: dict[str, dict[str, int]], path: Path) -> None:
    """Add entries to a file, or replace them there."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(known | entries, indent=1, sort_keys=True) + "\n")


def main() -> None:
    """Tune the shapes of the command line, or the usual ones."""
    if not torch.cuda.is_available():
        sys.exit("bench/tune.py needs a GPU")
    numbers = [int(argument) for argument in sys.argv[1:]]
    shapes = list(zip(numbers[::2], numbers[1::2], strict=True)) or SHAPES
    device = torch.device("cuda")
    for head_dim, group in shapes:
        write(tune(head_dim, group, device), heuristics.CONFIGS / f"{arch(device)}.json")


if __name__ == "__main__":
    main()
