"""Every operation in plain torch: what the kernels are measured against, and what runs off the GPU.

Written to be read, not to be fast. Arithmetic is float32, or float64 where that is given.
Letters: T tokens, S sequences, HQ query heads, HK key heads, DK and DV the sizes of keys and
values, P tokens a block, N rows, V tokens in the vocabulary.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kernels.draw import Draw, Penalties
from kernels.head_norms import HeadNorms
from kernels.paged_cache import PagedCache

# ---------------------------------------------------------------- attention


def attend(
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
) -> Tensor:
    """Causal attention of packed queries (T, HQ, DK) to a paged cache; returns (T, HQ, DV).

    Sequence s has the queries [query_start_loc[s], query_start_loc[s + 1]), which are the last of
    its seq_lens[s] tokens. A query at position p sees the keys (p - window, p]; a window of 0 is
    none. A softcap c above 0 turns scores x into c * tanh(x / c). A sink (HQ,) is a score that
    takes part in the softmax and has no value. A sequence of no tokens gives zeros.
    """
    out = query.new_zeros(query.shape[0], query.shape[1], cache.value_dim)
    starts = query_start_loc.tolist()
    for s, (first, last) in enumerate(pairwise(starts)):
        length = int(seq_lens[s])
        if first == last or not length:
            continue
        key, value = (t.float() for t in gather(cache, block_tables[s], length))  # (L, HK, D)
        group = query.shape[1] // cache.num_kv_heads
        scores = torch.einsum(
            "qhd,khd->hqk", query[first:last].float(), key.repeat_interleave(group, dim=1)
        )
        scores *= scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length, device=query.device)
        ahead = (
            at - at[length - (last - first) :, None]
        )  # (M, L): how far a key is ahead of a query
        hidden = (ahead > 0) | (ahead <= -window) if window else ahead > 0
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.float()[:, None, None].expand(-1, last - first, 1)
            weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, dim=1))
        out[first:last] = attended.to(out.dtype)
    return out


def gather(cache: PagedCache, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The real keys (L, HK, DK) and values (L, HK, DV) of one sequence, brought together."""
    num_blocks = -(-length // cache.block_size)
    blocks = block_table[:num_blocks].long()  # beyond, it means nothing
    parts = []
    for pool, scale in ((cache.key, cache.key_scale), (cache.value, cache.value_scale)):
        together = pool[blocks].transpose(1, 2).flatten(0, 1)[:length]
        parts.append(together if scale is None else together.float() * scale)
    return parts[0], parts[1]


# ---------------------------------------------------------------- into the cache


def reshape_and_cache(key: Tensor, value: Tensor, cache: PagedCache, slot_mapping: Tensor) -> None:
    """Store key (T, HK, DK) and value (T, HK, DV) at slots (T,); a slot below 0 stores nothing."""
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    blocks, offsets = slots // cache.block_size, slots % cache.block_size
    for pool, new, scale in (
        (cache.key, key, cache.key_scale),
        (cache.value, value, cache.value_scale),
    ):
        pool[blocks, :, offsets] = to_stored(new[stored], pool.dtype, scale)


def to_stored(numbers: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Numbers as a pool holds them; a float8 takes what is too large as its largest value."""
    if scale is None:
        return numbers.to(dtype)
    largest = torch.finfo(dtype).max
    return (numbers.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)


def rotary(heads: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate heads (T, H, D) by their positions (T,); the halves of a head are the pairs.

    cos_sin (L, D) float32 holds the D / 2 cosines of a position, then its sines.
    """
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # (T, 1, D / 2) each
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(heads.dtype)


def rotary_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: PagedCache,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotate and store keys, store values; returns the rotated query (T, HQ, DK).

    With norms, each head is normalised before.
    """
    if norms is not None:
        query, _ = residual_rmsnorm(query, None, norms.query, norms.eps)
        key, _ = residual_rmsnorm(key, None, norms.key, norms.eps)
    reshape_and_cache(rotary(key, positions, cos_sin), value, cache, slot_mapping)
    return rotary(query, positions, cos_sin)


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks: pairs (N, 2) are block ids in the pools source and target."""
    blocks = pairs.long().cpu()
    taken = source[blocks[:, 0].to(source.device)]
    target[blocks[:, 1].to(target.device)] = taken.to(target.device)


# ---------------------------------------------------------------- between attention and matrices


def residual_rmsnorm(
    hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add residual (…, N) to hidden (…, N), and normalise the sum; returns (normalised, sum).

    The sum is rounded before it is squared, and the normalised one before it is weighted, as in the
    models that were trained that way.
    """
    total = hidden if residual is None else (hidden.float() + residual.float()).to(hidden.dtype)
    wide = total.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normal.to(hidden.dtype), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up (T, 2 N), the gates first; returns (T, N)."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1.0 + torch.exp(-wide))).to(gate.dtype) * up


# ---------------------------------------------------------------- sampling


def sample(logits: Tensor, how: Draw, penalties: Penalties | None = None) -> tuple[Tensor, Tensor]:
    """Sample a token for each row of logits (N, V); see `sampling.sample`."""
    wide = logits.float() if penalties is None else penalised(logits.float(), penalties)
    largest, greedy = wide.max(dim=-1)  # the lowest token of equals
    is_finite = largest.isfinite() & ~wide.isnan().any(-1)
    is_drawing = is_finite & (how.temperature > 0)
    scores = (wide - largest[:, None]) / torch.where(is_drawing, how.temperature, 1.0)[:, None]
    kept = scores >= threshold(scores, how)[:, None]
    tokens = torch.arange(logits.shape[1], device=logits.device)
    noisy = torch.where(kept, scores + gumbel(how.keys, tokens), -torch.inf)
    drawn = torch.where(is_drawing, noisy.argmax(-1), greedy)
    return torch.where(is_finite, drawn, 0), is_finite


def penalised(logits: Tensor, penalties: Penalties) -> Tensor:
    """Logits (N, V) float32 less what `penalties` takes from them."""
    bits = torch.arange(32, device=logits.device)
    in_prompt = (penalties.in_prompt[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]]
    slots = penalties.slots.long()
    is_asked = (slots >= 0)[:, None]
    counts = torch.where(is_asked, penalties.counts[slots.clamp(min=0)], 0)
    is_seen = is_asked & ((counts > 0) | (in_prompt[slots.clamp(min=0)] > 0))
    repetition = penalties.repetition[:, None]
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    out = torch.where(is_seen, repeated, logits)
    out = out - penalties.frequency[:, None] * counts
    return out - torch.where(counts > 0, penalties.presence[:, None], 0.0)


def threshold(scores: Tensor, how: Draw) -> Tensor:
    """The smallest score (N,) that a row keeps of its scores (N, V), of which the largest is 0."""
    ordered = scores.sort(dim=-1, descending=True).values
    limit = torch.where(how.top_k > 0, how.top_k, scores.shape[1]).clamp(max=scores.shape[1])
    kth = ordered.gather(1, limit[:, None].long() - 1)[:, 0]
    floor = torch.maximum(kth, torch.where(how.min_p > 0, how.min_p.log(), -torch.inf))
    mass = torch.where(ordered >= floor[:, None], ordered.exp(), 0).double()
    before = mass.cumsum(-1) - mass
    num_kept = (before < how.top_p.double()[:, None] * mass.sum(-1, keepdim=True)).sum(-1)
    nucleus = ordered.gather(1, num_kept.clamp(min=1)[:, None] - 1)[:, 0]
    return torch.where(how.top_p < 1, torch.maximum(floor, nucleus), floor)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Noise (N, C) of tokens (C,) for rows with keys (N, 2); see `kernels.gumbel`."""
    bits = tokens.to(torch.int32) * keys[:, :1] + keys[:, 1:]
    for shift, factor in ((16, 0x85EBCA6B - 2**32), (13, 0xC2B2AE35 - 2**32), (16, 1)):
        bits = (bits ^ (bits >> shift) & (2 ** (32 - shift) - 1)) * factor
    uniform = ((bits & 0x7FFFFFFF).float() + 0.5) * 2.0**-31
    return -torch.log(-torch.log1p(-uniform.clamp(max=1.0 - 2.0**-24)))
