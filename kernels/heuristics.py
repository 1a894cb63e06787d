"""How large the tiles are: a table by device, phase, head size and bytes a number.

Written down rather than searched for at run time, so that a kernel is compiled once and a result
does not depend on what was timed. Where `configs/<arch>.json`, which `bench/tune.py` writes on a
GPU, has an entry, it goes before the rules here. The rules are chosen so that no kernel spills.

A tile decides how sums are rounded, so the tile of a sequence never depends on its batch: what
does depend on the batch is only how many rows of queries a program takes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import triton
from torch import Tensor

from kernels.paged_cache import PagedCache
from kernels.target import arch, num_multiprocessors

_HAVE_ROOM = ("sm_90", "sm_100", "sm_103")  # operands of a product stay in shared memory
_HAVE_TENSOR_MEMORY = ("sm_100", "sm_103")  # sums are not in registers
_AMPERE = ("sm_80", "sm_86", "sm_87")
CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How `decode_attention` runs."""

    tile: int  # keys that are multiplied at once
    num_warps: int = 4
    num_stages: int = 3  # tiles that are on their way from memory
    programs_per_multiprocessor: int = 4


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How `prefill_attention` runs."""

    block_m: int  # rows of queries: tokens times query heads of a key head
    tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rules look at."""

    arch: str
    head_dim: int  # the larger of key and value, as a power of two
    group: int  # query heads of a key head
    query_bytes: int  # of one number
    cache_bytes: int  # of one number

    @property
    def key(self) -> str:
        """Name of an entry in `configs/<arch>.json`, after the phase."""
        return f"d{self.head_dim}-g{self.group}-q{self.query_bytes}-kv{self.cache_bytes}"


def shape_of(query: Tensor, cache: PagedCache) -> Shape:
    """What the rules look at, of query (…, HQ, DK) and the cache it attends to."""
    return Shape(
        arch(query.device),
        triton.next_power_of_2(max(cache.key_dim, cache.value_dim)),
        query.shape[-2] // cache.num_kv_heads,
        query.element_size(),
        cache.key.element_size(),
    )


def decode_config(query: Tensor, cache: PagedCache) -> DecodeConfig:
    """Choose for one query token a sequence."""
    shape = shape_of(query, cache)
    tuned = _tuned(shape.arch).get(f"decode-{shape.key}")
    return DecodeConfig(**tuned) if tuned else decode_rule(shape)


def prefill_config(query: Tensor, cache: PagedCache) -> PrefillConfig:
    """Choose for packed queries (T, HQ, DK): smaller blocks of rows where large ones are few."""
    shape = shape_of(query, cache)
    tuned = _tuned(shape.arch).get(f"prefill-{shape.key}")
    config = PrefillConfig(**tuned) if tuned else prefill_rule(shape)
    num_blocks = -(-query.shape[0] * shape.group // config.block_m) * cache.num_kv_heads
    if config.block_m > 64 and num_blocks < 2 * num_multiprocessors(query.device):
        config = replace(config, block_m=64, num_warps=4)
    return replace(config, block_m=max(config.block_m, triton.next_power_of_2(shape.group)))


def decode_rule(shape: Shape) -> DecodeConfig:
    """Large tiles for the bandwidth, as long as four programs fit the registers."""
    if shape.query_bytes == 4:
        return DecodeConfig(tile=16 if shape.head_dim > 128 else 32, num_stages=2)
    is_ampere = shape.arch in _AMPERE
    if shape.head_dim > 128:
        return DecodeConfig(tile=32, num_stages=3 if is_ampere else 2)
    if is_ampere and shape.group > 16:
        return DecodeConfig(tile=32 if shape.cache_bytes == 1 else 64, num_stages=2)
    is_narrow = shape.cache_bytes == 1 or (is_ampere and shape.head_dim == 128)
    return DecodeConfig(tile=32 if is_narrow else 64)


def prefill_rule(shape: Shape) -> PrefillConfig:
    """At least 64 rows, which a Hopper GPU multiplies twice as fast as fewer."""
    if shape.query_bytes == 4:  # not for matrix units: all is in registers
        return PrefillConfig(block_m=16, tile=16, num_warps=4, num_stages=2)
    has_room = shape.arch in _HAVE_ROOM
    if shape.head_dim > 128:
        return PrefillConfig(64, tile=32 if has_room else 16, num_warps=8, num_stages=3)
    is_small = shape.head_dim <= 64
    tile = 64 if (is_small or has_room) and shape.cache_bytes == 2 else 32
    num_stages = 2 if is_small and shape.arch not in _HAVE_TENSOR_MEMORY else 3
    return PrefillConfig(128, tile=tile, num_warps=8, num_stages=num_stages)


@cache
def _tuned(arch: str) -> dict[str, Any]:
    path = CONFIGS / f"{arch}.json"
    return json.loads(path.read_text()) if path.exists() else {}
