"""What is written to the cache: the mapped slots, and nothing else in the whole pool."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.copy_blocks import copy_blocks
from kernels.head_norms import HeadNorms
from kernels.paged_cache import FLOAT8, PagedCache
from kernels.reshape_and_cache import reshape_and_cache
from kernels.rotary_and_cache import rotary_and_cache
from tests.fakes import triton_interpreter

SLOTS = [37, -1, 0, 79, 48, -1, 5]  # of 5 blocks of 16: the first and the last slot among them
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def make_cache(dtype: torch.dtype, num_kv_heads: int, dim: int, value_dim: int) -> PagedCache:
    """A pool in which every byte pattern is a number, or NaN, that must stay as it is."""
    scale = torch.tensor([0.25]) if dtype in FLOAT8 else None
    pools = [torch.randn(5, num_kv_heads, 16, size).to(dtype) for size in (dim, value_dim)]
    for pool in pools:
        pool[1] = torch.nan
    return PagedCache(*pools, scale, scale)


def bits(tensor: Tensor) -> Tensor:
    """So that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def copied(cache: PagedCache) -> PagedCache:
    return PagedCache(cache.key.clone(), cache.value.clone(), cache.key_scale, cache.value_scale)


def assert_same_pools(actual: PagedCache, expected: PagedCache) -> None:
    assert torch.equal(bits(actual.key), bits(expected.key))
    assert torch.equal(bits(actual.value), bits(expected.value))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "dim", "value_dim"), [(3, 64, 64), (2, 80, 128)])
def test_only_mapped_slots_change(
    dtype: torch.dtype, num_kv_heads: int, dim: int, value_dim: int
) -> None:
    cache = make_cache(dtype, num_kv_heads, dim, value_dim)
    expected = copied(cache)
    key = torch.randn(len(SLOTS), num_kv_heads, dim).to(dtype)
    value = torch.randn(len(SLOTS), num_kv_heads, value_dim).to(dtype)
    slots = torch.tensor(SLOTS)
    reshape_and_cache(key, value, cache, slots)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            expected.key[slot // 16, :, slot % 16] = key[token]
            expected.value[slot // 16, :, slot % 16] = value[token]
    assert_same_pools(cache, expected)


def test_keys_may_lie_head_by_head() -> None:
    cache = make_cache(torch.bfloat16, 3, 64, 64)
    expected = copied(cache)
    key, value = torch.randn(2, 3, len(SLOTS), 64).to(torch.bfloat16)
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    reshape_and_cache(key.transpose(0, 1), value.transpose(0, 1), cache, slots)
    reference.reshape_and_cache(key.transpose(0, 1), value.transpose(0, 1), expected, slots)
    assert_same_pools(cache, expected)


@pytest.mark.parametrize("dtype", triton_interpreter.FLOAT8)
def test_float8_is_scaled_rounded_and_saturated(dtype: torch.dtype) -> None:
    cache = make_cache(dtype, 2, 64, 64)
    expected = copied(cache)
    key, value = torch.randn(2, len(SLOTS), 2, 64).to(torch.bfloat16) * 3
    key[0, 0, :2] = torch.tensor([1e6, -1e6])
    reshape_and_cache(key, value, cache, torch.tensor(SLOTS))
    reference.reshape_and_cache(key, value, expected, torch.tensor(SLOTS))
    assert_same_pools(cache, expected)
    largest = torch.finfo(dtype).max
    assert cache.key[37 // 16, 0, 37 % 16, :2].float().tolist() == [largest, -largest]


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [*((d, d) for d in DTYPES), (torch.bfloat16, FLOAT8[0])]
)
@pytest.mark.parametrize("num_heads", [9, 2])
def test_rotary_and_cache_is_the_reference(
    dtype: torch.dtype, cache_dtype: torch.dtype, num_heads: int
) -> None:
    num_kv_heads = num_heads if num_heads == 2 else 3
    cache = make_cache(cache_dtype, num_kv_heads, 80, 64)
    expected = copied(cache)
    num_tokens = len(SLOTS)
    query = torch.randn(num_tokens, num_heads, 80).to(dtype)
    key = torch.randn(num_tokens, num_kv_heads, 80).to(dtype)
    value = torch.randn(num_tokens, num_kv_heads, 64).to(dtype)
    positions, angles = torch.tensor([3, 0, 11, 7, 1, 2, 5]), torch.randn(12, 40)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    operands = (positions, torch.tensor(SLOTS), cos_sin)
    rotated = rotary_and_cache(query, key, value, cache, *operands)
    assert torch.equal(rotated, reference.rotary_and_cache(query, key, value, expected, *operands))
    assert_same_pools(cache, expected)
    in_place = query.clone()
    rotary_and_cache(in_place, key, value, cache, *operands, out=in_place)
    assert torch.equal(in_place, rotated)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [9, 2])
def test_heads_are_normalised_before_they_are_rotated(dtype: torch.dtype, num_heads: int) -> None:
    """Within one rounding: squares are added up in another order."""
    cache = make_cache(dtype, 2, 80, 64)
    expected = copied(cache)
    heads = torch.randn(len(SLOTS), num_heads + 4, 80).to(dtype) * 20
    query, key, value = heads.split([num_heads, 2, 2], dim=1)
    heads[0, 0] = 0.0
    norms = HeadNorms(torch.randn(80).to(dtype), torch.randn(80).to(dtype), 1e-5)
    angles = torch.randn(12, 40)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    operands = (query, key, value[..., :64])
    places = (torch.tensor([3, 0, 11, 7, 1, 2, 5]), torch.tensor(SLOTS), cos_sin)
    wanted = reference.rotary_and_cache(*operands, expected, *places, norms)
    rotated = rotary_and_cache(*operands, cache, *places, norms=norms)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    near = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(rotated, wanted, **near)
    torch.testing.assert_close(cache.key, expected.key, **near)
    if dtype != torch.float32:
        assert (rotated == wanted).float().mean() > 0.98, "rounded where the reference is"
    assert torch.equal(bits(cache.value), bits(expected.value))
    plain = rotary_and_cache(*operands, copied(cache), *places)
    assert (plain.float() - wanted.float()).abs().max() > 10, "without them it is something else"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_copies_move_whole_blocks_and_nothing_else(dtype: torch.dtype) -> None:
    source = torch.randn(6, 2, 16, 80).to(dtype)  # 2,560 numbers a block
    target = torch.randn(4, 2, 16, 80).to(dtype)
    expected = target.clone()
    pairs = torch.tensor([[5, 0], [0, 3], [2, 1]])
    copy_blocks(source, target, pairs)
    for from_block, to_block in pairs.tolist():
        expected[to_block] = source[from_block]
    assert torch.equal(bits(target), bits(expected))
