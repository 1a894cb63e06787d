"""Rotary embedding of queries and keys, and keys and values into the cache: one launch for all.

The halves of a head are the pairs that are rotated ("RoFormer", Su et al., 2021, in the order that
Llama uses). Where a model normalises its heads before, that is part of it. Keys are not written
anywhere but into the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.head_norms import HeadNorms
from kernels.paged_cache import INDICES, PagedCache, check, check_rows, padded
from kernels.reshape_and_cache import check_new, to_stored
from kernels.target import can_launch

_HEADS = 8  # of one token that one program takes


@triton.jit
def _load_heads(
    head_ptr: tl.tensor,  # (HEADS, 1): where each head begins
    norm_ptr: tl.tensor,  # (2 HALF,) or None
    eps: tl.tensor,
    is_real: tl.tensor,  # (HEADS, HALF_PADDED)
    dims: tl.tensor,  # (1, HALF_PADDED)
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The halves of heads, normalised if there is a norm; float32."""
    kind = head_ptr.dtype.element_ty
    first = tl.load(head_ptr + dims, mask=is_real, other=0.0).to(tl.float32)
    second = tl.load(head_ptr + HALF + dims, mask=is_real, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        squares = tl.sum(first * first + second * second, 1) / (2 * HALF)
        scale = tl.rsqrt(squares + eps)[:, None]
        weight = tl.load(norm_ptr + dims, mask=dims < HALF, other=0.0)
        other_weight = tl.load(norm_ptr + HALF + dims, mask=dims < HALF, other=0.0)
        first = (weight * (first * scale).to(kind)).to(tl.float32)  # rounded, as without fusion
        second = (other_weight * (second * scale).to(kind)).to(tl.float32)
    return first, second


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rotary_and_cache(
    out_ptr: tl.tensor,  # (T, HQ, DK)
    query_ptr: tl.tensor,  # (T, HQ, DK)
    key_ptr: tl.tensor,  # (T, HK, DK)
    value_ptr: tl.tensor,  # (T, HK, DV)
    key_pool_ptr: tl.tensor,  # (NB, HK, P, DK)
    value_pool_ptr: tl.tensor,  # (NB, HK, P, DV)
    positions_ptr: tl.tensor,  # (T,)
    slots_ptr: tl.tensor,  # (T,)
    cos_sin_ptr: tl.tensor,  # (L, DK) float32: cosines, then sines
    key_scale_ptr: tl.tensor,  # (1,) or None
    value_scale_ptr: tl.tensor,  # (1,) or None
    query_norm_ptr: tl.tensor,  # (DK,) or None
    key_norm_ptr: tl.tensor,  # (DK,) or None
    eps: tl.tensor,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_query_token: tl.int64,
    stride_query_head: tl.int64,
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
    HQ: tl.constexpr,
    HK: tl.constexpr,
    DK: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Rotate, and store, HEADS heads of one token: query heads first, then key heads."""
    HALF: tl.constexpr = DK // 2
    QUERY_GROUPS: tl.constexpr = (HQ + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    dims = tl.arange(0, HALF_PADDED)[None, :]
    is_dim = dims < HALF
    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * DK + dims
    cos = tl.load(angles_ptr, mask=is_dim, other=0.0)
    sin = tl.load(angles_ptr + HALF, mask=is_dim, other=0.0)
    if group < QUERY_GROUPS:
        heads = group * HEADS + tl.arange(0, HEADS)[:, None]
        is_real = (heads < HQ) & is_dim
        source = query_ptr + token * stride_query_token + heads * stride_query_head
        first, second = _load_heads(source, query_norm_ptr, eps, is_real, dims, HALF)
        target = out_ptr + token * stride_out_token + heads * stride_out_head + dims
        kind = out_ptr.dtype.element_ty
        tl.store(target, (first * cos - second * sin).to(kind), mask=is_real)
        tl.store(target + HALF, (second * cos + first * sin).to(kind), mask=is_real)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            place = (slot % BLOCK_SIZE).to(tl.int32)
            heads = (group - QUERY_GROUPS) * HEADS + tl.arange(0, HEADS)[:, None]
            is_real = (heads < HK) & is_dim
            source = key_ptr + token * stride_key_token + heads * stride_key_head
            first, second = _load_heads(source, key_norm_ptr, eps, is_real, dims, HALF)
            kind = key_ptr.dtype.element_ty  # rounded to it first, as without fusion
            rotated_first = (first * cos - second * sin).to(kind)
            rotated_second = (second * cos + first * sin).to(kind)
            target = (
                key_pool_ptr
                + block * stride_key_pool_block
                + place * stride_key_pool_slot
                + heads * stride_key_pool_head
                + dims
            )
            tl.store(
                target,
                to_stored(rotated_first, key_scale_ptr, key_pool_ptr, LARGEST),
                mask=is_real,
            )
            tl.store(
                target + HALF,
                to_stored(rotated_second, key_scale_ptr, key_pool_ptr, LARGEST),
                mask=is_real,
            )
            value_dims = tl.arange(0, DV_PADDED)[None, :]
            is_value = (heads < HK) & (value_dims < DV)
            source = value_ptr + token * stride_value_token + heads * stride_value_head
            value = tl.load(source + value_dims, mask=is_value, other=0.0)
            target = (
                value_pool_ptr
                + block * stride_value_pool_block
                + place * stride_value_pool_slot
                + heads * stride_value_pool_head
            )
            tl.store(
                target + value_dims,
                to_stored(value, value_scale_ptr, value_pool_ptr, LARGEST),
                mask=is_value,
            )


def rotary_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedCache,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    *,
    norms: HeadNorms | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate query (T, HQ, DK) and key (T, HK, DK), store key and value (T, HK, DV).

    Returns the rotated query, in `out` if that is given, which may be the query itself. positions
    (T,) are rows of cos_sin (L, DK) float32, which holds DK / 2 cosines, then as many sines. With
    norms, heads are normalised before they are rotated. slot_mapping as in `reshape_and_cache`.
    Raises ValueError for operands that do not fit.
    """
    check_new(key, value, cache, slot_mapping)
    num_tokens, num_heads, _ = query.shape
    device = query.device
    out = torch.empty_like(query) if out is None else out
    check("query", query, (len(key), None, cache.key_dim), (key.dtype,), cache.key.device)
    check("out", out, tuple(query.shape), (query.dtype,), device)
    check("positions", positions, (num_tokens,), INDICES, device)
    check("cos_sin", cos_sin, (None, cache.key_dim), (torch.float32,), device)
    check_rows("query", query)
    check_rows("out", out)
    if not cos_sin.is_contiguous():
        raise ValueError("cos_sin is not contiguous")
    if norms is not None:
        norms.check(cache.key_dim, query.dtype, device)
    operands = (query, key, value, cache, positions, slot_mapping, cos_sin, norms)
    if not can_launch(query):
        return out.copy_(reference.rotary_and_cache(*operands))
    if not num_tokens:
        return out
    num_groups = triton.cdiv(num_heads, _HEADS) + triton.cdiv(cache.num_kv_heads, _HEADS)
    _rotary_and_cache[(num_tokens, num_groups)](
        out,
        query,
        key,
        value,
        cache.key,
        cache.value,
        positions,
        slot_mapping,
        cos_sin,
        cache.key_scale,
        cache.value_scale,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        *out.stride()[:2],
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.key.stride()[:3],
        *cache.value.stride()[:3],
        HQ=num_heads,
        HK=cache.num_kv_heads,
        DK=cache.key_dim,
        HALF_PADDED=triton.next_power_of_2(cache.key_dim // 2),
        DV=cache.value_dim,
        DV_PADDED=padded(cache.value_dim),
        BLOCK_SIZE=cache.block_size,
        LARGEST=torch.finfo(cache.key.dtype).max,
        HEADS=_HEADS,
        num_warps=2,
        enable_fp_fusion=True,
    )
    return out
