"""Attention of several query tokens for each of many sequences: bound by matrix products.

Queries are packed without padding. A program takes BLOCK_M rows of one sequence and one key head: a
row is a query head of a token, so that a key that is loaded serves all G query heads that share it.

    rows of a program, G = 3, BLOCK_M = 16      q0h0 q0h1 q0h2 q1h0 … q4h2, and one row of padding

    keys of those 5 queries          0        begin   full_begin     full_end       end
                                     |  unseen  | left edge | seen by all | diagonal |
                                                   masked      unmasked      masked

Cached and new keys are read alike, in tiles that start at multiples of TILE, so a row's result does
not depend on how its prompt was cut into chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.attention_tile import (
    LOG2E,
    absorb,
    load_key,
    load_rows,
    load_value,
    normalised,
    score_factor,
    scores,
)
from kernels.heuristics import PrefillConfig, prefill_config
from kernels.paged_cache import PagedCache, check, check_attention, padded
from kernels.target import can_launch


@triton.jit
def _find_block(
    starts_ptr: tl.tensor, first: tl.tensor, num: tl.tensor, at: tl.tensor, BLOCK_Q: tl.constexpr
) -> tl.tensor:
    """Sequence that program `at` works for.

    Sequence s has the programs from (starts[s] - starts[first]) // BLOCK_Q + s - first on: enough
    for its tokens, and at most one to spare.
    """
    origin = tl.load(starts_ptr + first)
    low = first
    high = first + num
    while low < high:
        middle = (low + high) // 2
        start = tl.load(starts_ptr + middle) - origin
        if start // BLOCK_Q + middle - first <= at:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend_tiles(
    acc: tl.tensor,  # (M, DV) float32
    largest: tl.tensor,  # (M,)
    total: tl.tensor,  # (M,)
    query: tl.tensor,  # (M, DK)
    query_at: tl.tensor,  # (M,) positions
    begin: tl.tensor,
    end: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    table_ptr: tl.tensor,
    factor: tl.tensor,
    stride_key_block: tl.tensor,
    stride_key_slot: tl.tensor,
    stride_value_block: tl.tensor,
    stride_value_slot: tl.tensor,
    DK: tl.constexpr,
    DK_PADDED: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Attend to the keys [begin, end), tile after tile; all rows see all of them unless MASKED."""
    for tile in tl.range(begin, end, TILE, num_stages=STAGES):
        positions = tile + tl.arange(0, TILE)
        is_real = positions < end
        key_rows = load_rows(
            table_ptr, positions, end, stride_key_block, stride_key_slot, BLOCK_SIZE, MASKED
        )
        value_rows = load_rows(
            table_ptr, positions, end, stride_value_block, stride_value_slot, BLOCK_SIZE, MASKED
        )
        key = load_key(key_ptr, key_rows, is_real, DK, DK_PADDED, MASKED)
        value = load_value(value_ptr, value_rows, is_real, DV, DV_PADDED, MASKED)
        x = scores(query, key, factor, SOFTCAP)
        if MASKED:
            is_seen = (positions[None, :] <= query_at[:, None]) & is_real[None, :]
            if WINDOW > 0:
                is_seen = is_seen & (query_at[:, None] - positions[None, :] < WINDOW)
            x = tl.where(is_seen, x, float("-inf"))
        acc, largest, total = absorb(acc, largest, total, x, value.to(query.dtype))
    return acc, largest, total


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "stride_table"],
    do_not_specialize_on_alignment=["starts_ptr", "seq_lens_ptr", "tables_ptr"],
)
def _prefill(
    out_ptr: tl.tensor,  # (T, HQ, DV)
    query_ptr: tl.tensor,  # (T, HQ, DK)
    key_ptr: tl.tensor,  # (NB, HK, P, DK)
    value_ptr: tl.tensor,  # (NB, HK, P, DV)
    tables_ptr: tl.tensor,  # (S, B) int32
    starts_ptr: tl.tensor,  # (S + 1,)
    seq_lens_ptr: tl.tensor,  # (S,)
    sinks_ptr: tl.tensor,  # (HQ,) or None
    key_scale_ptr: tl.tensor,  # (1,) or None
    value_scale_ptr: tl.tensor,  # (1,) or None
    first_seq: tl.tensor,
    num_seqs: tl.tensor,
    scale: tl.tensor,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_query_token: tl.int64,
    stride_query_head: tl.int64,
    stride_key_block: tl.int64,
    stride_key_head: tl.tensor,
    stride_key_slot: tl.tensor,
    stride_value_block: tl.int64,
    stride_value_head: tl.tensor,
    stride_value_slot: tl.tensor,
    stride_table: tl.int64,
    G: tl.constexpr,
    DK: tl.constexpr,
    DK_PADDED: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Attend with BLOCK_M // G tokens of one sequence to one key head."""
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    seq = _find_block(starts_ptr, first_seq, num_seqs, tl.program_id(0), BLOCK_Q)
    kv_head = tl.program_id(1)
    start = tl.load(starts_ptr + seq)
    query_len = tl.load(starts_ptr + seq + 1) - start
    origin = tl.load(starts_ptr + first_seq)
    block = tl.program_id(0) - ((start - origin) // BLOCK_Q + seq - first_seq)
    num_blocks = tl.cdiv(query_len, BLOCK_Q)
    if block >= num_blocks:
        return
    block = num_blocks - 1 - block  # the last queries see most keys: they start first
    seq_len = tl.load(seq_lens_ptr + seq)
    cached = seq_len - query_len

    rows = tl.arange(0, BLOCK_M)
    in_seq = block * BLOCK_Q + rows // G  # (M,) which query of the sequence
    heads = kv_head * G + rows % G
    is_row = (in_seq < query_len) & (rows < BLOCK_Q * G)
    key_dims = tl.arange(0, DK_PADDED)
    tokens = (start + in_seq).to(tl.int64)
    query = tl.load(
        query_ptr
        + (tokens * stride_query_token + heads * stride_query_head)[:, None]
        + key_dims[None, :],
        mask=is_row[:, None] & (key_dims < DK)[None, :],
        other=0.0,
    )

    query_at = cached + in_seq
    first_at = cached + block * BLOCK_Q
    last_at = tl.minimum(first_at + BLOCK_Q, seq_len) - 1
    begin = 0
    full_begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_at - WINDOW + 1, 0) // TILE * TILE
        full_begin = tl.maximum(last_at - WINDOW + 1, 0)
        full_begin = (full_begin + TILE - 1) // TILE * TILE
    full_end = (first_at + 1) // TILE * TILE
    full_begin = tl.minimum(full_begin, full_end)
    end = last_at + 1

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:
        sinks = tl.load(sinks_ptr + heads, mask=is_row, other=0.0).to(tl.float32)
        largest = sinks * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PADDED], tl.float32)
    factor = score_factor(scale, key_scale_ptr, SOFTCAP)
    key_head_ptr = key_ptr + kv_head * stride_key_head
    value_head_ptr = value_ptr + kv_head * stride_value_head
    table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
    if WINDOW > 0:
        acc, largest, total = _attend_tiles(
            acc, largest, total, query, query_at, begin, full_begin,
            key_head_ptr, value_head_ptr, table_ptr, factor,
            stride_key_block, stride_key_slot, stride_value_block, stride_value_slot,
            DK, DK_PADDED, DV, DV_PADDED, BLOCK_SIZE, WINDOW, SOFTCAP, TILE, STAGES, True,
        )  # fmt: skip
    acc, largest, total = _attend_tiles(
        acc, largest, total, query, query_at, full_begin, full_end,
        key_head_ptr, value_head_ptr, table_ptr, factor,
        stride_key_block, stride_key_slot, stride_value_block, stride_value_slot,
        DK, DK_PADDED, DV, DV_PADDED, BLOCK_SIZE, WINDOW, SOFTCAP, TILE, STAGES, False,
    )  # fmt: skip
    acc, largest, total = _attend_tiles(
        acc, largest, total, query, query_at, full_end, end,
        key_head_ptr, value_head_ptr, table_ptr, factor,
        stride_key_block, stride_key_slot, stride_value_block, stride_value_slot,
        DK, DK_PADDED, DV, DV_PADDED, BLOCK_SIZE, WINDOW, SOFTCAP, TILE, STAGES, True,
    )  # fmt: skip

    value_dims = tl.arange(0, DV_PADDED)
    tl.store(
        out_ptr
        + (tokens * stride_out_token + heads * stride_out_head)[:, None]
        + value_dims[None, :],
        normalised(acc, total, value_scale_ptr).to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (value_dims < DV)[None, :],
    )


# ---------------------------------------------------------------- the launcher


def attend_ragged(
    query: Tensor,
    cache: PagedCache,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    first_seq: int = 0,
    out: Tensor | None = None,
    config: PrefillConfig | None = None,
) -> Tensor:
    """Attend with packed queries (T, HQ, DK); gives (T, HQ, DV). See `reference.attend`.

    query_start_loc (S + 1,), seq_lens (S,) and block_tables (S, B) are int32. The keys and values
    of the queries are in the cache already. Sequences before `first_seq` are left out, and what
    `out` holds for them is not touched. Raises ValueError for operands that do not fit.
    """
    num_tokens, num_heads, _ = query.shape
    num_seqs = len(seq_lens)
    if out is None:
        out = query.new_empty(num_tokens, num_heads, cache.value_dim)
    check_attention(query, cache, block_tables, num_seqs, sinks, out)
    check("query_start_loc", query_start_loc, (num_seqs + 1,), (torch.int32,), query.device)
    check("seq_lens", seq_lens, (num_seqs,), (torch.int32,), query.device)
    if first_seq >= num_seqs:
        return out
    operands = (query, cache, block_tables, query_start_loc, seq_lens)
    if can_launch(query):
        config = config or prefill_config(query, cache)
        _launch(*operands, scale, window, softcap, sinks, first_seq, out, config)
    else:
        tables, starts, lens = (t[first_seq:] for t in operands[2:])
        attended = reference.attend(
            query,
            cache,
            tables,
            starts,
            lens,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        out[starts[0] : starts[-1]] = attended[starts[0] : starts[-1]]
    return out


def _launch(
    query: Tensor,
    cache: PagedCache,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    first_seq: int,
    out: Tensor,
    config: PrefillConfig,
) -> None:
    num_seqs = len(seq_lens) - first_seq
    group = query.shape[1] // cache.num_kv_heads
    if config.block_m < group:
        raise ValueError(f"{config.block_m} rows cannot hold {group} query heads of a key head")
    num_blocks = query.shape[0] // (config.block_m // group) + num_seqs
    _prefill[(num_blocks, cache.num_kv_heads)](
        out,
        query,
        cache.key,
        cache.value,
        block_tables,
        query_start_loc,
        seq_lens,
        sinks,
        cache.key_scale,
        cache.value_scale,
        first_seq,
        num_seqs,
        scale,
        *out.stride()[:2],
        *query.stride()[:2],
        *cache.key.stride()[:3],
        *cache.value.stride()[:3],
        block_tables.stride(0),
        G=group,
        DK=cache.key_dim,
        DK_PADDED=padded(cache.key_dim),
        DV=cache.value_dim,
        DV_PADDED=padded(cache.value_dim),
        BLOCK_SIZE=cache.block_size,
        WINDOW=window,
        SOFTCAP=softcap,
        BLOCK_M=config.block_m,
        TILE=config.tile,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        enable_fp_fusion=True,
    )
