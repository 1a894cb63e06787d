"""How near the Triton kernels come to what a GPU can do.

Run on a machine with a GPU, after `bench.gpu_checks`: python -m bench.gpu_kernels. Takes minutes,
most of it for compiling. Times are medians with a cold L2 cache; rates are held against a copy and
a matrix product that the same GPU did a moment before. Gates nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import triton

from bench.gpu_batches import BFLOAT16, LARGE, decode, make_batch, prefill
from kernels.draw import Draw
from kernels.paged_cache import float8_of
from kernels.residual_rmsnorm import residual_rmsnorm
from kernels.rotary_and_cache import rotary_and_cache
from kernels.sampling import sample
from kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one size."""

    name: str
    run: Callable[[], object]
    num_bytes: float = 0  # that must move; or else
    num_flops: float = 0  # that must be computed
    aim: float = 0  # share of what the GPU can do that the design aims at


def attention_cases(device: torch.device) -> Iterator[Case]:
    """Decode is measured by what it reads, prefill by what it multiplies."""
    zipf = (128 * np.random.default_rng(0).zipf(1.3, 64)).clip(128, 16384).tolist()
    for name, lens, kind, aim in (
        ("decode 64 x 4096", [4096] * 64, None, 0.70),
        ("decode 32 x 1024", [1024] * 32, None, 0.45),
        ("decode 8 x 4096", [4096] * 8, None, 0.50),
        ("decode 1 x 32768", [32768], None, 0.50),
        ("decode 64, lengths by Zipf", zipf, None, 0.60),
        ("decode 64 x 4096, float8", [4096] * 64, float8_of(device), 0.52),
    ):
        batch = make_batch([1] * len(lens), lens, device, LARGE, cache_dtype=kind)
        yield Case(name, decode(batch), num_bytes=batch.cache_bytes, aim=aim)
    for name, queries, lens, aim in (
        ("prefill 1 x 8192", [8192], [8192], 0.42),
        ("prefill 16 x 1024", [1024] * 16, [1024] * 16, 0.28),
        ("prefill 2048 behind 14336", [2048], [16384], 0.38),
    ):
        batch = make_batch(queries, lens, device, LARGE)
        pairs = sum(q * length - q * (q - 1) / 2 for q, length in zip(queries, lens, strict=True))
        yield Case(
            name, prefill(batch), num_flops=4 * pairs * LARGE.query_heads * LARGE.dim, aim=aim
        )


def other_cases(device: torch.device) -> Iterator[Case]:
    """The rest is bound by memory."""
    rows = 8192
    batch = make_batch([rows], [rows], device, LARGE)
    key, value = torch.randn(2, rows, LARGE.kv_heads, LARGE.dim, device=device).to(BFLOAT16)
    at = torch.arange(rows, device=device)
    cos_sin = torch.randn(rows, LARGE.dim, device=device)
    moved = 2 * (batch.query.numel() + key.numel() + value.numel()) * 2
    yield Case(
        "rotary_and_cache 8192",
        lambda: rotary_and_cache(batch.query, key, value, batch.cache, at, at, cos_sin),
        num_bytes=moved,
        aim=0.65,
    )
    hidden, residual = torch.randn(2, rows, LARGE.hidden, device=device).to(BFLOAT16)
    weight = hidden[0].clone()
    yield Case(
        "residual_rmsnorm 8192 x 4096",
        lambda: residual_rmsnorm(hidden, residual, weight, 1e-5),
        num_bytes=4 * hidden.numel() * 2,
        aim=0.65,
    )
    gate_up = torch.randn(rows, 2 * LARGE.intermediate, device=device).to(BFLOAT16)
    yield Case(
        "silu_mul 8192 x 14336",
        lambda: silu_mul(gate_up),
        num_bytes=1.5 * gate_up.numel() * 2,
        aim=0.65,
    )
    logits = torch.randn(64, LARGE.vocabulary, device=device)
    for name, top_k, top_p in (("none", 0, 1.0), ("k 50, p 0.9", 50, 0.9), ("p 0.9", 0, 0.9)):
        ones = torch.ones(64, device=device)
        keys = torch.randint(-(2**31), 2**31, (64, 2), device=device).int()
        how = Draw(ones, ones.int() * top_k, ones * top_p, ones * 0, keys)
        yield Case(
            f"sample 64 x 128256, {name}",
            lambda how=how: sample(logits, how),  # type: ignore[misc]
            num_bytes=logits.numel() * 4,
        )


def baseline_cases(device: torch.device) -> Iterator[Case]:
    """Attention of torch, with keys and values in one piece."""
    for name, queries, keys, batch in (
        ("torch, prefill 1 x 8192", 8192, 8192, 1),
        ("torch, decode 64 x 4096", 1, 4096, 64),
    ):
        query = torch.randn(batch, LARGE.query_heads, queries, LARGE.dim, device=device).to(
            BFLOAT16
        )
        key, value = torch.randn(2, batch, LARGE.kv_heads, keys, LARGE.dim, device=device).to(
            BFLOAT16
        )
        run = lambda q=query, k=key, v=value: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
            q, k, v, is_causal=q.shape[2] > 1, enable_gqa=True
        )
        if queries == 1:
            yield Case(name, run, num_bytes=2 * key.numel() * 2)
        else:
            yield Case(
                name, run, num_flops=4 * queries * (queries + 1) / 2 * LARGE.query_heads * LARGE.dim
            )


def milliseconds(run: Callable[[], object]) -> float:
    """Median time of a call, the L2 cache cold."""
    return float(triton.testing.do_bench(run, warmup=50, rep=200, return_mode="median"))


def roofline(device: torch.device) -> tuple[float, float]:
    """What this GPU does now: bytes a second of a copy, operations a second of a product."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3
    matrix = torch.randn(8192, 8192, device=device).to(BFLOAT16)
    return bandwidth, 2 * 8192**3 / milliseconds(lambda: matrix @ matrix) * 1e3


def main() -> None:
    """Measure, print."""
    if not torch.cuda.is_available():
        sys.exit("bench/gpu_kernels.py needs a GPU")
    device = torch.device("cuda")
    torch.manual_seed(0)
    bandwidth, arithmetic = roofline(device)
    print(f"{torch.cuda.get_device_name(device)}, Triton {triton.__version__}")
    print(f"copy {bandwidth / 1e9:.0f} GB/s, bfloat16 product {arithmetic / 1e12:.0f} TFLOP/s")
    print(f"{'':32} {'us':>9} {'rate':>14} {'share':>6} {'aim':>5}")
    for cases in (attention_cases, other_cases, baseline_cases):
        for case in cases(device):
            seconds = milliseconds(case.run) / 1e3
            if case.num_flops:
                rate, best, unit = case.num_flops / seconds / 1e12, arithmetic / 1e12, "TFLOP/s"
            else:
                rate, best, unit = case.num_bytes / seconds / 1e9, bandwidth / 1e9, "GB/s"
            aim = f"{case.aim:.0%}" if case.aim else ""
            figures = f"{seconds * 1e6:9.1f} {rate:6.0f} {unit:7} {rate / best:6.0%} {aim:>5}"
            print(f"{case.name:32} {figures}", flush=True)


if __name__ == "__main__":
    main()
