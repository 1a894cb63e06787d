"""Attention to keys and values that lie together: functions on tensors, and nothing else.

HQ query heads share HK key heads, G = HQ / HK each. What may not be seen is masked by -inf, so it
must be finite. Everything else is `torch.nn.functional.scaled_dot_product_attention`, except for
soft-capped scores and sinks, which it does not know.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from gpu_worker.attention.base import LayerAttention

TILE = 256  # queries that share one mask: bounds its size, and skips most keys that none may see


def attend_single(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: LayerAttention
) -> Tensor:
    """One query for each of N sequences.

    query (N, HQ, DK); key (N, HK, L, DK); value (N, HK, L, DV); mask (N, 1, 1, L), added to the
    scores; returns (N, HQ, DV). The G queries of a key head are the rows of one matrix.
    """
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    packed = query.reshape(-1, num_kv_heads, num_heads // num_kv_heads, query.shape[2])
    if how.softcap is None and how.sinks is None:
        out = functional.scaled_dot_product_attention(
            packed, key, value, attn_mask=mask, scale=how.scale
        )
    else:
        out = _step_by_step(packed, key, value, mask, how)
    return out.reshape(-1, num_heads, value.shape[-1])


def attend_causal(query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
    """M queries of one sequence, which are the last M of its L tokens.

    query (HQ, M, DK); key (HK, L, DK); value (HK, L, DV); returns (HQ, M, DV).
    """
    num_queries, num_keys = query.shape[1], key.shape[1]
    window = how.sliding_window or num_keys
    is_plain = how.softcap is None and how.sinks is None
    if is_plain and num_queries == num_keys <= window:
        return _grouped(query, key, value, None, how)
    num_cached = num_keys - num_queries
    tiles = []
    for first in range(0, num_queries, TILE):
        last = min(first + TILE, num_queries)
        begin, end = max(num_cached + first + 1 - window, 0), num_cached + last
        query_at = torch.arange(num_cached + first, end, device=query.device).unsqueeze(1)
        key_at = torch.arange(begin, end, device=query.device)
        hidden = (key_at > query_at) | (key_at <= query_at - window)
        mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        part = query[:, first:last], key[:, begin:end], value[:, begin:end]
        tiles.append((_grouped if is_plain else _grouped_step_by_step)(*part, mask, how))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: LayerAttention
) -> Tensor:
    """(HQ, M, DK) to (HQ, M, DV); without a mask it is causal, and M = L."""
    return functional.scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=how.scale,
        enable_gqa=True,
    )[0]


def _grouped_step_by_step(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: LayerAttention
) -> Tensor:
    """The same with (G, M) as the rows of a key head; mask (M, L)."""
    num_heads, num_queries, key_dim = query.shape
    num_kv_heads = key.shape[0]
    group = num_heads // num_kv_heads
    rows = query.reshape(1, num_kv_heads, group * num_queries, key_dim)
    out = _step_by_step(rows, key[None], value[None], mask.repeat(group, 1), how)
    return out.reshape(num_heads, num_queries, -1)


def _step_by_step(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, how: LayerAttention
) -> Tensor:
    """Query (N, HK, G * M, DK), the queries of a head together; returns (N, HK, G * M, DV)."""
    scores = torch.matmul(query, key.transpose(2, 3)).float() * how.scale  # (N, HK, G * M, L)
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    scores += mask.float()
    if how.sinks is None:
        weights = scores.softmax(-1)
    else:
        num_kv_heads, num_rows = scores.shape[1:3]
        sinks = how.sinks.float().view(num_kv_heads, -1)  # (HK, G)
        sinks = sinks.repeat_interleave(num_rows // sinks.shape[1], dim=1)  # (HK, G * M)
        column = sinks[None, :, :, None].expand(scores.shape[0], -1, -1, 1)
        weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return torch.matmul(weights.to(value.dtype), value)
