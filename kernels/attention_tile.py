"""One tile of attention: M query rows meet T keys and values of a paged cache.

What decode and prefill have in common, as functions that are compiled into both. The softmax is the
running one of "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018), in powers
of two. A row that has seen nothing yet has the maximum -inf, and may see nothing in a tile.

    queries (M, DK) . keys (DK, T)   = scores (M, T)   scaled, capped, masked
    weights (M, T)  . values (T, DV) = acc (M, DV)     unnormalised, float32
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_sequence(
    starts_ptr: tl.tensor, first: tl.tensor, num: tl.tensor, at: tl.tensor
) -> tl.tensor:
    """Largest s in [first, first + num) with starts[s] <= at; starts never fall."""
    low = first
    high = first + num
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) <= at:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def score_factor(scale: tl.tensor, key_scale_ptr: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """What a product of query and stored key is multiplied by; see `scores`."""
    factor = scale
    if key_scale_ptr is not None:
        factor = factor * tl.load(key_scale_ptr)
    if SOFTCAP == 0.0:
        factor = factor * LOG2E
    return factor


@triton.jit
def load_rows(
    table_ptr: tl.tensor,
    positions: tl.tensor,
    end: tl.tensor,
    stride_block: tl.tensor,
    stride_slot: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Where positions (T,) are in a pool, from its first number on, as int64 (T,).

    The block table is not read at positions from `end` on, if MASKED; else all are below it.
    """
    entry = table_ptr + positions // BLOCK_SIZE
    place = (positions % BLOCK_SIZE) * stride_slot
    if MASKED:
        block = tl.load(entry, mask=positions < end, other=0)
        return block.to(tl.int64) * stride_block + place
    return tl.load(entry).to(tl.int64) * stride_block + place


@triton.jit
def load_key(
    key_ptr: tl.tensor,
    rows: tl.tensor,
    is_real: tl.tensor,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Keys (PADDED, T) of rows (T,), transposed; zeros where nothing is: 0 * NaN would be NaN."""
    dims = tl.arange(0, PADDED)
    entry = key_ptr + rows[None, :] + dims[:, None]
    if MASKED:
        return tl.load(entry, mask=is_real[None, :] & (dims < DIM)[:, None], other=0.0)
    if DIM < PADDED:
        return tl.load(entry, mask=(dims < DIM)[:, None], other=0.0)
    return tl.load(entry)


@triton.jit
def load_value(
    value_ptr: tl.tensor,
    rows: tl.tensor,
    is_real: tl.tensor,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Values (T, PADDED) of rows (T,); zeros where nothing is."""
    dims = tl.arange(0, PADDED)
    entry = value_ptr + rows[:, None] + dims[None, :]
    if MASKED:
        return tl.load(entry, mask=is_real[:, None] & (dims < DIM)[None, :], other=0.0)
    if DIM < PADDED:
        return tl.load(entry, mask=(dims < DIM)[None, :], other=0.0)
    return tl.load(entry)


@triton.jit
def scores(query: tl.tensor, key: tl.tensor, factor: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scores (M, T) in powers of two: exp2 of them is what the softmax sums up.

    tanh(x) is 1 - 2 / (exp(2x) + 1), which stays finite wherever exp does not.
    """
    x = tl.dot(query, key.to(query.dtype), input_precision="ieee") * factor
    if SOFTCAP > 0.0:
        x = tl.exp2(x * (2.0 * LOG2E / SOFTCAP))
        x = (SOFTCAP * LOG2E) * (1.0 - 2.0 / (x + 1.0))
    return x


@triton.jit
def absorb(
    acc: tl.tensor, largest: tl.tensor, total: tl.tensor, x: tl.tensor, value: tl.tensor
) -> tl.tensor:
    """Take scores (M, T) and values (T, DV) into acc (M, DV), largest (M,) and total (M,)."""
    new_largest = tl.maximum(largest, tl.max(x, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # -inf - -inf would be NaN
    weights = tl.exp2(x - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")
    return acc, new_largest, total


@triton.jit
def normalised(acc: tl.tensor, total: tl.tensor, value_scale_ptr: tl.tensor) -> tl.tensor:
    """The attended (M, DV); zeros where a row saw nothing."""
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if value_scale_ptr is not None:
        acc = acc * tl.load(value_scale_ptr)
    return acc
