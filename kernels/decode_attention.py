"""Attention of one query token for each of many sequences: bound by how fast the cache is read.

A sequence comes in pieces, as `kernels.decode_plan` cuts it. Each piece and each key head is one
work item; a fixed number of programs walks over the items, which balances sequences of very
different lengths. How many items there are is read on the device, so that a launch which a CUDA
graph repeats does what the lengths of that moment ask for. The G query heads of a key head are the
rows of one matrix. A sequence in one piece is written out at once; of the others, the pieces are
put together by a second kernel.
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
    find_sequence,
    load_key,
    load_rows,
    load_value,
    normalised,
    score_factor,
    scores,
)
from kernels.decode_plan import DecodePlan, Launch
from kernels.heuristics import DecodeConfig, decode_config
from kernels.paged_cache import FLOATS, PagedCache, check, check_attention, padded
from kernels.target import can_launch, num_multiprocessors

_PIECES = 16  # that are put together at once

# ---------------------------------------------------------------- the kernels


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "max_items", "stride_table"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "work_starts_ptr", "tables_ptr"],
)
def _decode(
    out_ptr: tl.tensor,  # (S, HQ, DV)
    query_ptr: tl.tensor,  # (S, HQ, DK)
    key_ptr: tl.tensor,  # (NB, HK, P, DK)
    value_ptr: tl.tensor,  # (NB, HK, P, DV)
    tables_ptr: tl.tensor,  # (S, B) int32
    seq_lens_ptr: tl.tensor,  # (S,)
    work_starts_ptr: tl.tensor,  # (S + 1,)
    partial_ptr: tl.tensor,  # (items, HQ, DV) float32: what the pieces attended to, not normalised
    stats_ptr: tl.tensor,  # (2, items, HQ) float32: their largest score, and their total weight
    sinks_ptr: tl.tensor,  # (HQ,) or None
    key_scale_ptr: tl.tensor,  # (1,) or None
    value_scale_ptr: tl.tensor,  # (1,) or None
    first_seq: tl.tensor,
    num_seqs: tl.tensor,
    max_items: tl.tensor,
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
    HK: tl.constexpr,
    G: tl.constexpr,
    DK: tl.constexpr,
    DK_PADDED: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Attend to one piece of one sequence for one key head, item after item."""
    group = tl.arange(0, BLOCK_M)
    key_dims = tl.arange(0, DK_PADDED)
    value_dims = tl.arange(0, DV_PADDED)
    is_head = group < G
    factor = score_factor(scale, key_scale_ptr, SOFTCAP)
    first_item = tl.load(work_starts_ptr + first_seq)
    num_items = tl.load(work_starts_ptr + first_seq + num_seqs) - first_item
    for item in tl.range(tl.program_id(0), num_items * HK, tl.num_programs(0)):
        local = item // HK
        kv_head = item % HK
        work = first_item + local
        seq = find_sequence(work_starts_ptr, first_seq, num_seqs, work)
        work_start = tl.load(work_starts_ptr + seq)
        num_pieces = tl.load(work_starts_ptr + seq + 1) - work_start
        seq_len = tl.load(seq_lens_ptr + seq)
        # The piece is the tokens [begin, end), the query sees [visible, seq_len).
        visible = 0
        piece = work - work_start
        if WINDOW > 0:
            visible = tl.maximum(seq_len - WINDOW, 0)
            piece += visible // SPLIT
        begin = piece * SPLIT
        end = tl.minimum(begin + SPLIT, seq_len)
        if WINDOW > 0:
            begin = tl.maximum(begin, visible // TILE * TILE)

        heads = kv_head * G + group
        query = tl.load(
            query_ptr
            + seq.to(tl.int64) * stride_query_token
            + heads[:, None] * stride_query_head
            + key_dims[None, :],
            mask=is_head[:, None] & (key_dims < DK)[None, :],
            other=0.0,
        )
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if sinks_ptr is not None:  # noqa: SIM102 - this is decided by the compiler, that at run time
            if work == work_start:  # once in a sequence
                sinks = tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32)
                largest = sinks * LOG2E
                total = tl.full([BLOCK_M], 1.0, tl.float32)
        acc = tl.zeros([BLOCK_M, DV_PADDED], tl.float32)
        table_ptr = tables_ptr + seq.to(tl.int64) * stride_table
        for tile in tl.range(begin, end, TILE, num_stages=STAGES):
            positions = tile + tl.arange(0, TILE)
            is_real = positions < end
            key_rows = load_rows(
                table_ptr, positions, end, stride_key_block, stride_key_slot, BLOCK_SIZE, True
            )
            value_rows = load_rows(
                table_ptr, positions, end, stride_value_block, stride_value_slot, BLOCK_SIZE, True
            )
            key_head_ptr = key_ptr + kv_head * stride_key_head
            value_head_ptr = value_ptr + kv_head * stride_value_head
            key = load_key(key_head_ptr, key_rows, is_real, DK, DK_PADDED, True)
            value = load_value(value_head_ptr, value_rows, is_real, DV, DV_PADDED, True)
            x = scores(query, key, factor, SOFTCAP)
            is_seen = is_real
            if WINDOW > 0:
                is_seen = is_real & (positions >= visible)
            x = tl.where(is_seen[None, :], x, float("-inf"))
            acc, largest, total = absorb(acc, largest, total, x, value.to(query.dtype))

        is_value = is_head[:, None] & (value_dims < DV)[None, :]
        if num_pieces == 1:
            tl.store(
                out_ptr
                + seq.to(tl.int64) * stride_out_token
                + heads[:, None] * stride_out_head
                + value_dims[None, :],
                normalised(acc, total, value_scale_ptr).to(out_ptr.dtype.element_ty),
                mask=is_value,
            )
        else:
            rows = local.to(tl.int64) * (HK * G) + heads
            tl.store(partial_ptr + rows[:, None] * DV + value_dims[None, :], acc, mask=is_value)
            tl.store(stats_ptr + rows, largest, mask=is_head)
            tl.store(stats_ptr + max_items.to(tl.int64) * (HK * G) + rows, total, mask=is_head)


@triton.jit(
    do_not_specialize=["first_seq", "max_items"],
    do_not_specialize_on_alignment=["work_starts_ptr"],
)
def _reduce(
    out_ptr: tl.tensor,  # (S, HQ, DV)
    partial_ptr: tl.tensor,  # (items, HQ, DV)
    stats_ptr: tl.tensor,  # (2, items, HQ)
    work_starts_ptr: tl.tensor,  # (S + 1,)
    value_scale_ptr: tl.tensor,  # (1,) or None
    first_seq: tl.tensor,
    max_items: tl.tensor,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    HQ: tl.constexpr,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    """Put the pieces of one sequence and one query head together, in rising order."""
    seq = first_seq + tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(work_starts_ptr + seq)
    num_pieces = tl.load(work_starts_ptr + seq + 1) - begin
    if num_pieces == 1:
        return
    begin -= tl.load(work_starts_ptr + first_seq)
    dims = tl.arange(0, DV_PADDED)
    is_value = dims < DV
    largest = float("-inf")
    total = 0.0
    acc = tl.zeros([DV_PADDED], tl.float32)
    for first in tl.range(0, num_pieces, PIECES):
        pieces = first + tl.arange(0, PIECES)
        is_piece = pieces < num_pieces
        rows = (begin + pieces).to(tl.int64) * HQ + head
        pieces_largest = tl.load(stats_ptr + rows, mask=is_piece, other=float("-inf"))
        totals_ptr = stats_ptr + max_items.to(tl.int64) * HQ
        pieces_total = tl.load(totals_ptr + rows, mask=is_piece, other=0.0)
        partial = tl.load(
            partial_ptr + rows[:, None] * DV + dims[None, :],
            mask=is_piece[:, None] & is_value[None, :],
            other=0.0,
        )
        new_largest = tl.maximum(largest, tl.max(pieces_largest, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = tl.exp2(largest - base)
        weights = tl.exp2(pieces_largest - base)
        total = total * shrink + tl.sum(pieces_total * weights, 0)
        acc = acc * shrink + tl.sum(partial * weights[:, None], 0)
        largest = new_largest
    acc = acc / tl.where(total == 0.0, 1.0, total)
    if value_scale_ptr is not None:
        acc = acc * tl.load(value_scale_ptr)
    tl.store(
        out_ptr + seq.to(tl.int64) * stride_out_token + head * stride_out_head + dims,
        acc.to(out_ptr.dtype.element_ty),
        mask=is_value,
    )


# ---------------------------------------------------------------- the launcher


def attend_decodes(
    query: Tensor,
    cache: PagedCache,
    block_tables: Tensor,
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """Attend with query (S, HQ, DK), one token for each sequence of the plan; gives (S, HQ, DV).

    The token is the last of its sequence, and is in the cache already. block_tables (S, B) int32.
    What `softcap` and `sinks` mean is said at `reference.attend`. Raises ValueError for operands
    that do not fit.
    """
    num_seqs, num_heads, _ = query.shape
    if out is None:
        out = query.new_empty(num_seqs, num_heads, cache.value_dim)
    _check(query, cache, block_tables, plan, sinks, out)
    if not can_launch(query):
        starts = torch.arange(num_seqs + 1)
        attended = reference.attend(
            query,
            cache,
            block_tables,
            starts,
            plan.seq_lens,
            scale=scale,
            window=plan.window,
            softcap=softcap,
            sinks=sinks,
        )
        return out.copy_(attended)
    config = config or decode_config(query, cache)
    for launch in plan.launches:
        _launch(launch, query, cache, block_tables, plan, scale, softcap, sinks, out, config)
    return out


def _check(
    query: Tensor,
    cache: PagedCache,
    block_tables: Tensor,
    plan: DecodePlan,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    device, num_seqs = query.device, len(plan.seq_lens)
    check_attention(query, cache, block_tables, num_seqs, sinks, out)
    check("query", query, (num_seqs, None, cache.key_dim), FLOATS)
    check("seq_lens", plan.seq_lens, (num_seqs,), (torch.int32,), device)
    if plan.split % cache.block_size:
        raise ValueError(f"pieces of {plan.split} tokens do not consist of whole blocks")


def _launch(
    launch: Launch,
    query: Tensor,
    cache: PagedCache,
    block_tables: Tensor,
    plan: DecodePlan,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    out: Tensor,
    config: DecodeConfig,
) -> None:
    num_heads = query.shape[1]
    dims = (num_heads, cache.value_dim)
    num_kept = launch.max_items if launch.needs_reduce else 0
    partial = torch.empty((num_kept, *dims), dtype=torch.float32, device=query.device)
    stats = torch.empty((2, num_kept, num_heads), dtype=torch.float32, device=query.device)
    group = num_heads // cache.num_kv_heads
    num_programs = config.programs_per_multiprocessor * num_multiprocessors(query.device)
    value_padded = padded(cache.value_dim)
    grid = (max(min(num_programs, launch.max_items * cache.num_kv_heads), 1),)
    _decode[grid](
        out,
        query,
        cache.key,
        cache.value,
        block_tables,
        plan.seq_lens,
        plan.work_starts,
        partial,
        stats,
        sinks,
        cache.key_scale,
        cache.value_scale,
        launch.first_seq,
        launch.num_seqs,
        launch.max_items,
        scale,
        *out.stride()[:2],
        *query.stride()[:2],
        *cache.key.stride()[:3],
        *cache.value.stride()[:3],
        block_tables.stride(0),
        HK=cache.num_kv_heads,
        G=group,
        DK=cache.key_dim,
        DK_PADDED=padded(cache.key_dim),
        DV=cache.value_dim,
        DV_PADDED=value_padded,
        BLOCK_SIZE=cache.block_size,
        SPLIT=plan.split,
        WINDOW=plan.window,
        SOFTCAP=softcap,
        BLOCK_M=max(16, triton.next_power_of_2(group)),
        TILE=config.tile,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        enable_fp_fusion=True,
    )
    if launch.needs_reduce:
        _reduce[(launch.num_seqs, num_heads)](
            out,
            partial,
            stats,
            plan.work_starts,
            cache.value_scale,
            launch.first_seq,
            launch.max_items,
            *out.stride()[:2],
            HQ=num_heads,
            DV=cache.value_dim,
            DV_PADDED=value_padded,
            PIECES=_PIECES,
            num_warps=4,
            enable_fp_fusion=True,
        )
