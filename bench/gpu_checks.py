"""Is every kernel right on this device? Each is held against `kernels.reference`.

    python -m bench.gpu_checks [NAME…]          on a machine with a GPU; all at once by default
    bench/gpu.sh --cpu                          the same in Triton's interpreter, in small sizes

Every dtype that the device converts, windows, soft caps, sinks, float32 without tf32, and pools of
more than 2^31 numbers. An AssertionError says what is off, and by how much.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu_batches import (
    BFLOAT16,
    LARGE,
    TINY,
    Batch,
    Sizes,
    decode,
    make_batch,
    prefill,
)
from kernels import reference
from kernels.copy_blocks import copy_blocks
from kernels.draw import Draw, Penalties
from kernels.head_norms import HeadNorms
from kernels.paged_cache import PagedCache, float8_of
from kernels.reshape_and_cache import reshape_and_cache
from kernels.residual_rmsnorm import residual_rmsnorm
from kernels.rotary_and_cache import rotary_and_cache
from kernels.sampling import sample
from kernels.silu_mul import silu_mul

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, BFLOAT16: 2e-2}
DTYPES = tuple(TOLERANCES)


def worst_of(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite where one is no number and the other is."""
    difference = (actual.double() - expected.double()).abs()
    return float(difference.nan_to_num(nan=float("inf")).max())


def demand(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise AssertionError unless two tensors are that near."""
    worst = worst_of(actual, expected)
    assert worst <= tolerance, f"{what}: off by {worst}"


# ---------------------------------------------------------------- attention


def check_attention(
    device: torch.device,
    sizes: Sizes,
    lengths: tuple[int, ...],
    dtype: torch.dtype = BFLOAT16,
    *,
    is_float8: bool = False,
    is_large: bool = False,
) -> None:
    """Decode and prefill in every variant; `is_large`: behind 2^31 numbers of the pool."""
    window = max(lengths) // 3
    sinks = torch.randn(sizes.query_heads, device=device)
    variants: list[dict[str, Any]] = [{}, {"window": window}, {"softcap": 20.0}, {"sinks": sinks}]
    cache_dtype = float8_of(device) if is_float8 else None
    spare = 2**31 // (sizes.kv_heads * sizes.block_size * sizes.dim) + 1 if is_large else 0
    for query_lens, attend in (
        ([1] * len(lengths), decode),
        ([min(length, 200) for length in lengths], prefill),
    ):
        batch = make_batch(
            query_lens,
            list(lengths),
            device,
            sizes,
            dtype=dtype,
            cache_dtype=cache_dtype,
            spare_blocks=spare,
        )
        tolerance = 4e-2 if is_float8 else TOLERANCES[dtype]
        for how in variants:
            name = f"{attend.__name__} {dtype} {cache_dtype or ''} {list(how)}"
            demand(name, attend(batch, **how)(), _attended(batch, how), tolerance)


def check_shapes(device: torch.device, sizes: Sizes, lengths: tuple[int, ...]) -> None:
    """Heads of all sizes; one query head for each key head, and all for one."""
    shapes = [replace(sizes, dim=dim) for dim in (64, 80, 96, 256)]
    shapes += [replace(sizes, query_heads=sizes.kv_heads), replace(sizes, kv_heads=1)]
    for shape in shapes:
        batch = make_batch([1] * len(lengths), list(lengths), device, shape)
        demand(f"decode {shape}", decode(batch)(), _attended(batch, {}), TOLERANCES[BFLOAT16])
        batch = make_batch([min(n, 40) for n in lengths], list(lengths), device, shape)
        demand(f"prefill {shape}", prefill(batch)(), _attended(batch, {}), TOLERANCES[BFLOAT16])


def _attended(batch: Batch, how: dict[str, Any]) -> Tensor:
    operands = (batch.query, batch.cache, batch.block_tables, batch.starts, batch.lens)
    return reference.attend(*operands, scale=batch.scale, **how)


# ---------------------------------------------------------------- into the cache, and between pools


def check_cache_writes(device: torch.device, sizes: Sizes, num_tokens: int) -> None:
    """What is written is right, and everything else stays as it was, bit by bit."""
    for dtype, cache_dtype in (
        (torch.float32, None),
        (BFLOAT16, None),
        (BFLOAT16, float8_of(device)),
    ):
        batch = make_batch(
            [num_tokens], [num_tokens], device, sizes, dtype=dtype, cache_dtype=cache_dtype
        )
        pools = [batch.cache, _copied(batch.cache)]
        shape = (num_tokens, sizes.kv_heads, sizes.dim)
        key, value = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        key[0, 0, :2] = torch.tensor([1e6, -1e6], device=device)  # too large for a float8
        slots = torch.randperm(len(batch.cache.key) * sizes.block_size, device=device)[:num_tokens]
        slots[1::5] = -1
        reshape_and_cache(key, value, pools[0], slots)
        reference.reshape_and_cache(key, value, pools[1], slots)
        _demand_same_bits(f"reshape_and_cache {dtype} {cache_dtype}", *pools)
        angles = torch.randn(num_tokens, sizes.dim // 2, device=device)
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        at = torch.arange(num_tokens, device=device)
        key[0, 0, :2] = 0
        operands = (at, slots, cos_sin)
        weight = torch.rand(sizes.dim, device=device).to(dtype)
        # A product may be fused with a sum: a number can fall on the other side of a rounding.
        tolerance = 1e-5 if dtype == torch.float32 else 4e-2
        of_keys = tolerance if cache_dtype is None else 0.6
        for norms in (None, HeadNorms(weight, weight.flip(0), 1e-5)):
            heads = (batch.query, key, value)
            rotated = rotary_and_cache(*heads, pools[0], *operands, norms=norms)
            expected = reference.rotary_and_cache(*heads, pools[1], *operands, norms)
            name = f"rotary_and_cache {dtype}{' with norms' if norms else ''}"
            demand(name, rotated, expected, tolerance)
            demand(f"{name}, keys", pools[0].key, pools[1].key, of_keys)
            demand(f"{name}, values", pools[0].value, pools[1].value, 0)


def _copied(cache: PagedCache) -> PagedCache:
    return replace(cache, key=cache.key.clone(), value=cache.value.clone())


def _demand_same_bits(what: str, actual: PagedCache, expected: PagedCache) -> None:
    for one, other in ((actual.key, expected.key), (actual.value, expected.value)):
        same = torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        assert same, f"{what}: other bits"


def check_copies(device: torch.device, sizes: Sizes) -> None:
    """Whole blocks, and nothing else."""
    shape = (9, sizes.kv_heads, sizes.block_size, sizes.dim)
    source, target = (torch.randn(shape, device=device).to(BFLOAT16) for _ in range(2))
    expected, pairs = target.clone(), torch.tensor([[8, 0], [0, 7], [2, 1]], device=device)
    copy_blocks(source, target, pairs)
    reference.copy_blocks(source, expected, pairs)
    demand("copy_blocks", target, expected, 0)


# ---------------------------------------------------------------- rows


def check_rows(device: torch.device, sizes: Sizes) -> None:
    """Normalisation and activation."""
    for dtype in DTYPES:
        hidden, residual = (
            torch.randn(37, sizes.hidden, device=device).to(dtype) for _ in range(2)
        )
        weight = torch.randn(sizes.hidden, device=device).to(dtype)
        expected, total = reference.residual_rmsnorm(hidden, residual, weight, 1e-5)
        actual = residual_rmsnorm(hidden, residual, weight, 1e-5)
        tolerance = 1e-4 if dtype == torch.float32 else 0.1  # of numbers up to 10: one rounding
        demand(f"residual_rmsnorm {dtype}", actual, expected, tolerance)
        demand(f"residual_rmsnorm {dtype}, the sum", residual, total, 0)
        gate_up = torch.randn(37, 2 * sizes.intermediate, device=device).to(dtype)
        expected = reference.silu_mul(gate_up)
        demand(f"silu_mul {dtype}", silu_mul(gate_up), expected, tolerance)


# ---------------------------------------------------------------- sampling


def check_sampling(device: torch.device, sizes: Sizes, num_rows: int) -> None:
    """The very tokens of the reference, drawn with every filter, and those that penalties leave.

    Noise and scores are rounded as on the CPU but for the last bit of a logarithm, and sums of
    probabilities are added up in another order, so one draw in thousands may differ.
    """
    logits = torch.randn(num_rows, sizes.vocabulary, device=device) * 3
    logits[1, 5], logits[2] = torch.nan, -torch.inf
    differing = 0
    filters = ((0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 50, 0.9, 0.0), (1.3, 0, 0.9, 0.01))
    for temperature, top_k, top_p, min_p in filters:
        ones = torch.ones(num_rows, device=device)
        keys = torch.randint(-(2**31), 2**31, (num_rows, 2), device=device).int()
        how = Draw(ones * temperature, ones.int() * top_k, ones * top_p, ones * min_p, keys)
        for penalties in (None, _penalties(num_rows, sizes.vocabulary, device)):
            tokens, is_finite = sample(logits, how, penalties)
            expected, expected_finite = reference.sample(logits, how, penalties)
            assert torch.equal(is_finite, expected_finite), "sample: which rows are no numbers"
            assert is_finite.tolist() == [row not in {1, 2} for row in range(num_rows)]
            differing += int((tokens != expected).sum())
    allowed = len(filters) * 2 * num_rows // 500
    assert differing <= allowed, f"sample: {differing} other tokens, {allowed} may be"


def _penalties(num_rows: int, vocabulary: int, device: torch.device) -> Penalties:
    ones = torch.ones(num_rows, device=device)
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-vocabulary // 32)), device=device).int()
    return Penalties(
        slots=torch.arange(num_rows, device=device).int(),
        repetition=ones * 1.2,
        frequency=ones * 0.3,
        presence=ones * 0.5,
        counts=torch.randint(0, 3, (num_rows, vocabulary), device=device).int(),
        in_prompt=words,
    )


# ---------------------------------------------------------------- all of it


def checks(device: torch.device) -> dict[str, Callable[[], None]]:
    """Every check, in the sizes of a model on a GPU, and as small as can be off it."""
    is_cuda = device.type == "cuda"
    sizes = LARGE if is_cuda else TINY
    lengths = (700, 1, 512, 1300, 33) if is_cuda else (40, 1, 17)
    attention = partial(check_attention, device, sizes, lengths)
    return {
        "attention-float32": lambda: attention(torch.float32),
        "attention-float16": lambda: attention(torch.float16),
        "attention-bfloat16": lambda: attention(is_large=is_cuda),
        "attention-float8": lambda: attention(is_float8=True),
        "attention-shapes": lambda: check_shapes(device, sizes, lengths),
        "cache-writes": lambda: check_cache_writes(device, sizes, 1000 if is_cuda else 20),
        "block-copies": lambda: check_copies(device, sizes),
        "rows": lambda: check_rows(device, sizes),
        "sampling": lambda: check_sampling(device, sizes, 64 if is_cuda else 4),
    }


def run(name: str, check: Callable[[], None]) -> int:
    """Say whether a check passes; 1 if not."""
    torch.manual_seed(0)
    try:
        check()
    except AssertionError as error:
        print(f"WRONG: {name}: {error}", flush=True)
        return 1
    print(f"right: {name}", flush=True)
    return 0


def run_apart(name: str) -> int:
    """The same in a process of its own: most of the time is the compiler's."""
    return subprocess.run([sys.executable, "-m", "bench.gpu_checks", name], check=False).returncode


def main(names: list[str]) -> int:
    """Check everything, or what is named; 1 if anything is off."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = checks(device)
    if names or device.type == "cpu":
        codes = [run(name, found[name]) for name in names or found]
    else:
        with ThreadPoolExecutor() as pool:
            codes = list(pool.map(run_apart, found))
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
