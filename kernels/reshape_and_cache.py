"""New keys and values go to their slots in the cache. Nothing else in the cache changes.

slot of a token     block id * P + place in the block; below 0: the token is padding, and is not
                    stored anywhere
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.paged_cache import FLOATS, INDICES, PagedCache, check, check_rows, padded
from kernels.target import can_launch


@triton.jit
def to_stored(
    numbers: tl.tensor, scale_ptr: tl.tensor, pool_ptr: tl.tensor, LARGEST: tl.constexpr
) -> tl.tensor:
    """Numbers as the pool holds them; without a scale they are what they are.

    What is too large for a float8 becomes the largest: not every device does so by itself.
    """
    if scale_ptr is not None:
        numbers = numbers.to(tl.float32) * (1.0 / tl.load(scale_ptr))
        numbers = tl.clamp(numbers, -LARGEST, LARGEST)
    return numbers.to(pool_ptr.dtype.element_ty)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _reshape_and_cache(
    key_ptr: tl.tensor,  # (T, HK, DK)
    value_ptr: tl.tensor,  # (T, HK, DV)
    key_pool_ptr: tl.tensor,  # (NB, HK, P, DK)
    value_pool_ptr: tl.tensor,  # (NB, HK, P, DV)
    slots_ptr: tl.tensor,  # (T,)
    key_scale_ptr: tl.tensor,  # (1,) or None
    value_scale_ptr: tl.tensor,  # (1,) or None
    stride_key_token: tl.int64,
    stride_key_head: tl.int64,
    stride_value_token: tl.int64,
    stride_value_head: tl.int64,
    stride_key_pool_block: tl.int64,
    stride_key_pool_head: tl.tensor,
    stride_key_pool_slot: tl.tensor,
    stride_value_pool_block: tl.int64,
    stride_value_pool_head: tl.tensor,
    stride_value_pool_slot: tl.tensor,
    HK: tl.constexpr,
    HK_PADDED: tl.constexpr,
    DK: tl.constexpr,
    DK_PADDED: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """Store one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    place = (slot % BLOCK_SIZE).to(tl.int32)
    heads = tl.arange(0, HK_PADDED)[:, None]
    key_dims = tl.arange(0, DK_PADDED)[None, :]
    value_dims = tl.arange(0, DV_PADDED)[None, :]
    is_key = (heads < HK) & (key_dims < DK)
    is_value = (heads < HK) & (value_dims < DV)

    key = tl.load(
        key_ptr + token * stride_key_token + heads * stride_key_head + key_dims, mask=is_key
    )
    value = tl.load(
        value_ptr + token * stride_value_token + heads * stride_value_head + value_dims,
        mask=is_value,
    )
    key_row_ptr = key_pool_ptr + block * stride_key_pool_block + place * stride_key_pool_slot
    value_row_ptr = (
        value_pool_ptr + block * stride_value_pool_block + place * stride_value_pool_slot
    )
    tl.store(
        key_row_ptr + heads * stride_key_pool_head + key_dims,
        to_stored(key, key_scale_ptr, key_pool_ptr, LARGEST),
        mask=is_key,
    )
    tl.store(
        value_row_ptr + heads * stride_value_pool_head + value_dims,
        to_stored(value, value_scale_ptr, value_pool_ptr, LARGEST),
        mask=is_value,
    )


def reshape_and_cache(key: Tensor, value: Tensor, cache: PagedCache, slot_mapping: Tensor) -> None:
    """Store key (T, HK, DK) and value (T, HK, DV) at slots (T,); a slot below 0 stores nothing.

    No slot may be named twice. Raises ValueError for operands that do not fit.
    """
    check_new(key, value, cache, slot_mapping)
    if not can_launch(key):
        reference.reshape_and_cache(key, value, cache, slot_mapping)
        return
    if not len(key):
        return
    _reshape_and_cache[(len(key),)](
        key,
        value,
        cache.key,
        cache.value,
        slot_mapping,
        cache.key_scale,
        cache.value_scale,
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.key.stride()[:3],
        *cache.value.stride()[:3],
        HK=cache.num_kv_heads,
        HK_PADDED=triton.next_power_of_2(cache.num_kv_heads),
        DK=cache.key_dim,
        DK_PADDED=padded(cache.key_dim),
        DV=cache.value_dim,
        DV_PADDED=padded(cache.value_dim),
        BLOCK_SIZE=cache.block_size,
        LARGEST=torch.finfo(cache.key.dtype).max,
        num_warps=4,
        enable_fp_fusion=True,
    )


def check_new(key: Tensor, value: Tensor, cache: PagedCache, slot_mapping: Tensor) -> None:
    """Raise ValueError unless key (T, HK, DK) and value (T, HK, DV) can go to the cache."""
    num_tokens, device = len(key), cache.key.device
    heads = cache.num_kv_heads
    check("key", key, (num_tokens, heads, cache.key_dim), FLOATS, device)
    check("value", value, (num_tokens, heads, cache.value_dim), (key.dtype,), device)
    check("slot_mapping", slot_mapping, (num_tokens,), INDICES, device)
    check_rows("key", key)
    check_rows("value", value)
    if not cache.is_float8 and cache.key.dtype != key.dtype:
        raise ValueError(f"the keys are {key.dtype}, but the cache is {cache.key.dtype}")
