"""What is compiled for GPUs that are not there: launches that a model of such a shape makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels.copy_blocks import copy_blocks
from kernels.decode_attention import attend_decodes
from kernels.decode_plan import plan_decodes
from kernels.draw import Draw, Penalties
from kernels.head_norms import HeadNorms
from kernels.paged_cache import FLOAT8, PagedCache
from kernels.prefill_attention import attend_ragged
from kernels.reshape_and_cache import reshape_and_cache
from kernels.residual_rmsnorm import residual_rmsnorm
from kernels.rotary_and_cache import rotary_and_cache
from kernels.sampling import sample
from kernels.silu_mul import silu_mul

CPU = torch.device("cpu")
NUM_KV_HEADS = 8
VARIANT = {"window": 1024, "softcap": 30.0}
FLOAT8_OF = {"sm_80": torch.float8_e5m2, "gfx942": torch.float8_e4m3fnuz}  # others: e4m3

Case = Callable[[str], object]


def cache_of(dtype: torch.dtype, dim: int) -> PagedCache:
    """A small cache with the strides of a large one."""
    pool = torch.zeros(4, NUM_KV_HEADS, 16, dim).to(dtype)
    scale = torch.ones(1) if dtype in FLOAT8 else None
    return PagedCache(pool, pool.clone(), scale, scale)


def float8(arch: str) -> torch.dtype:
    return FLOAT8_OF.get(arch, torch.float8_e4m3fn)


def decode(
    dim: int, group: int = 4, *, dtype: torch.dtype = torch.bfloat16, is_float8: bool = False,
    window: int = 0, **how: Any,
) -> Case:  # fmt: skip
    """One query token for each of four sequences, of which one is in two pieces."""

    def launch(arch: str) -> None:
        query = torch.zeros(4, NUM_KV_HEADS * group, dim, dtype=dtype)
        cache = cache_of(float8(arch) if is_float8 else dtype, dim)
        tables = torch.zeros(4, 3, dtype=torch.int32)
        plan = plan_decodes(np.array([32, 600, 1, 1]), CPU, window)
        sinks = torch.zeros(NUM_KV_HEADS * group) if how else None
        attend_decodes(query, cache, tables, plan, scale=0.1, sinks=sinks, **how)

    return launch


def prefill(
    dim: int, group: int = 4, *, dtype: torch.dtype = torch.bfloat16, is_float8: bool = False,
    num_tokens: int = 4096, **how: Any,
) -> Case:  # fmt: skip
    """Query tokens of four sequences."""

    def launch(arch: str) -> None:
        query = torch.zeros(num_tokens, NUM_KV_HEADS * group, dim, dtype=dtype)
        cache = cache_of(float8(arch) if is_float8 else dtype, dim)
        tables = torch.zeros(4, 3, dtype=torch.int32)
        starts = torch.arange(5, dtype=torch.int32) * (num_tokens // 4)
        lens = torch.full((4,), num_tokens // 4, dtype=torch.int32)
        sinks = torch.zeros(NUM_KV_HEADS * group) if how else None
        attend_ragged(query, cache, tables, starts, lens, scale=0.1, sinks=sinks, **how)

    return launch


def new_tokens(
    arch: str, *, is_float8: bool = False, is_rotated: bool = False, is_normed: bool = False
) -> None:
    """Three tokens into the cache."""
    cache = cache_of(float8(arch) if is_float8 else torch.bfloat16, 128)
    query = torch.zeros(3, 32, 128, dtype=torch.bfloat16)
    key = value = query[:, :NUM_KV_HEADS].contiguous()
    slots = torch.zeros(3, dtype=torch.int64)
    norms = HeadNorms(query[0, 0].clone(), query[0, 0].clone(), 1e-6) if is_normed else None
    if is_rotated:
        cos_sin = torch.zeros(16, 128)
        rotary_and_cache(query, key, value, cache, slots, slots, cos_sin, norms=norms)
    else:
        reshape_and_cache(key, value, cache, slots)


def normalise(_arch: str) -> None:
    rows = torch.zeros(2, 4096, dtype=torch.bfloat16)
    residual_rmsnorm(rows, rows.clone(), rows[0], 1e-5)


def activate(_arch: str) -> None:
    silu_mul(torch.zeros(2, 2 * 14336, dtype=torch.bfloat16))


def copy(_arch: str) -> None:
    pool = torch.zeros(4, NUM_KV_HEADS, 16, 128, dtype=torch.bfloat16)
    copy_blocks(pool, pool.clone(), torch.zeros(2, 2, dtype=torch.int64))


def draw(_arch: str, *, has_penalties: bool) -> None:
    logits = torch.zeros(2, 128256, dtype=torch.bfloat16)
    ones, whole = torch.ones(2), torch.ones(2, dtype=torch.int32)
    how = Draw(ones, whole.long(), ones, ones, torch.zeros(2, 2, dtype=torch.int32))
    counts = torch.zeros(2, 128256, dtype=torch.int32)
    penalties = Penalties(whole, ones, ones, ones, counts, counts[:, : 128256 // 32].contiguous())
    sample(logits, how, penalties if has_penalties else None)


SMALL = 64  # tokens: so few that blocks of rows are made smaller

ATTENTION: dict[str, Case] = {
    "decode d128": decode(128),
    "decode d64 g3": decode(64, 3),
    "decode d128 float8": decode(128, is_float8=True),
    "prefill d128": prefill(128),
    "prefill d128 small": prefill(128, num_tokens=SMALL),
    "prefill d64 g3": prefill(64, 3),
    "prefill d128 float8": prefill(128, is_float8=True),
    "decode d80 mha": decode(80, 1),
    "decode d96 mqa": decode(96, 24),
    "decode d128 float16": decode(128, dtype=torch.float16),
    "decode d256": decode(256),
    "decode d128 variant": decode(128, **VARIANT),
    "decode d128 float32": decode(128, dtype=torch.float32),
    "prefill d256": prefill(256),
    "prefill d80 mha": prefill(80, 1),
    "prefill d96 mqa": prefill(96, 24),
    "prefill d128 float16": prefill(128, dtype=torch.float16),
    "prefill d128 variant": prefill(128, **VARIANT),
    "prefill d128 float32": prefill(128, dtype=torch.float32),
}
OTHERS: dict[str, Case] = {
    "rotary_and_cache": lambda arch: new_tokens(arch, is_rotated=True),
    "rotary_and_cache norms": lambda arch: new_tokens(arch, is_rotated=True, is_normed=True),
    "residual_rmsnorm": normalise,
    "sample": lambda arch: draw(arch, has_penalties=False),
    "reshape_and_cache": new_tokens,
    "reshape_and_cache float8": lambda arch: new_tokens(arch, is_float8=True),
    "rotary_and_cache float8": lambda arch: new_tokens(arch, is_float8=True, is_rotated=True),
    "sample penalties": lambda arch: draw(arch, has_penalties=True),
    "silu_mul": activate,
    "copy_blocks": copy,
}


CASES = ATTENTION | OTHERS
