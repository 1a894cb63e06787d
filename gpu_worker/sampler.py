"""From logits to tokens: greedy, or drawn at random after temperature, top-k, min-p and top-p.

A draw is a pure function of (logits, parameters, seed, output index): no generator, no state, and
nothing of the batch it happens in. It is the Gumbel-max trick: the token with the largest
`logit / temperature + g` is drawn, where the noise g of a token comes from a counter-based hash.

    key   = splitmix64's finaliser, twice, of the seed and the output index       64 bits a row
    bits  = murmur3's 32-bit finaliser of token * (high half of key | 1) + low half of key
    g     = -log(-log1p(-u)), u = (the lower 31 bits + 1/2) / 2^31

All of it in wrapping 32-bit arithmetic, so that a kernel can do exactly the same.

Filters are in the order of vLLM: temperature, top-k, min-p, then top-p over what is left. Tokens
that are as likely as the last one kept are kept too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.block_table import IntArray
from gpu_worker.sampling_columns import SamplingColumns

NUM_CANDIDATES = 512  # most likely tokens that are put in order at first

_ELEMENTS_AT_ONCE = 2**19  # of the logits; what is computed from them stays near the processor

_CHUNK = 128  # tokens of which only the largest logit is looked at first

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUND_1, _ROUND_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MURMUR = ((16, 0x85EBCA6B - 2**32), (13, 0xC2B2AE35 - 2**32))  # shift, then multiply
_ALMOST_ONE = 1.0 - 2.0**-24


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How M of a step's N sampling rows draw; the others are greedy."""

    rows: Tensor  # (M,) int64: which of the N
    temperature: Tensor  # (M,) float32, above 0
    top_k: Tensor  # (M,) int64, 0 is off
    top_p: Tensor  # (M,) float32
    min_p: Tensor  # (M,) float32
    keys: Tensor  # (M, 2) int32: multiplier and offset of each row's hash

    def of(self, index: Tensor | slice) -> SamplingMetadata:
        """Some of the M rows."""
        columns = (self.rows, self.temperature, self.top_k, self.top_p, self.min_p, self.keys)
        return SamplingMetadata(*(column[index] for column in columns))


NO_TOKEN = -1
"""Of a row whose logits were no numbers."""

Sampler = Callable[[Tensor, SamplingColumns, IntArray, IntArray], Tensor]
"""Samples, from logits (N, V) of rows (N,), the output token (N,) of each: int64, or NO_TOKEN."""


def sample_in_torch(
    logits: Tensor, columns: SamplingColumns, rows: IntArray, output_index: IntArray
) -> Tensor:
    """Sample on any device, with what torch has."""
    return sample(logits, make_metadata(columns, rows, output_index, logits.device))


def make_metadata(
    columns: SamplingColumns, rows: IntArray, output_index: IntArray, device: torch.device
) -> SamplingMetadata | None:
    """Collect how rows (N,) sample their output token `output_index` (N,); None if all greedily."""
    drawing = np.flatnonzero(columns.temperature[rows] > 0)
    if not len(drawing):
        return None
    chosen = rows[drawing]

    def to_device(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return SamplingMetadata(
        rows=to_device(drawing),
        temperature=to_device(columns.temperature[chosen]),
        top_k=to_device(columns.top_k[chosen]),
        top_p=to_device(columns.top_p[chosen]),
        min_p=to_device(columns.min_p[chosen]),
        keys=to_device(row_keys(columns.seed[chosen], output_index[drawing])),
    )


def sample(logits: Tensor, metadata: SamplingMetadata | None) -> Tensor:
    """Sample one token for each of the rows (N, V): (N,) int64, or NO_TOKEN."""
    largest, token_ids = _largest(logits)
    if metadata is not None:
        rows_at_once = max(_ELEMENTS_AT_ONCE // logits.shape[1], 1)
        for start in range(0, len(metadata.rows), rows_at_once):
            part = metadata.of(slice(start, start + rows_at_once))
            scores = logits[part.rows].float() - largest[part.rows].float().unsqueeze(1)
            scores /= part.temperature.unsqueeze(1)  # (M, V)
            token_ids[part.rows] = _draw(scores, part)
    return torch.where(largest.isfinite(), token_ids, NO_TOKEN)


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row (N, V), and its token; the lowest token of equals.

    On the CPU torch finds a maximum much faster than its place, so the place is looked for among
    few numbers.
    """
    num_rows, num_tokens = logits.shape
    if logits.device.type != "cpu" or num_tokens % _CHUNK:
        return logits.max(dim=-1)
    chunks = logits.view(num_rows, num_tokens // _CHUNK, _CHUNK)
    largest, chunk = chunks.amax(-1).max(-1)
    token = chunks[torch.arange(num_rows), chunk].max(-1).indices
    return largest, chunk * _CHUNK + token


def row_keys(seeds: NDArray[np.uint64], output_index: IntArray) -> NDArray[np.int32]:
    """Hash seed and output index (M,) to what the noise of a row starts from: (M, 2)."""
    mixed = _mixed(_mixed(seeds) + (output_index.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    halves = np.stack((mixed >> np.uint64(32) | np.uint64(1), mixed), axis=1)
    return halves.astype(np.uint32).view(np.int32)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ values >> np.uint64(30)) * _ROUND_1
    values = (values ^ values >> np.uint64(27)) * _ROUND_2
    return values ^ values >> np.uint64(31)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise (M, C) of tokens (C,) or (M, C) for rows with `keys` (M, 2)."""
    bits = token_ids.to(torch.int32) * keys[:, :1]
    bits += keys[:, 1:]
    for shift, factor in _MURMUR:
        bits ^= _shifted(bits, shift)
        bits *= factor
    bits ^= _shifted(bits, 16)
    bits &= 0x7FFFFFFF
    uniform = bits.float()
    uniform.add_(0.5).mul_(2.0**-31).clamp_(max=_ALMOST_ONE)  # fine near 0, where the winners are
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Shift to the right without the sign."""
    shifted = bits >> shift
    shifted &= (1 << (32 - shift)) - 1
    return shifted


# ---------------------------------------------------------------- filters and the draw


def _draw(scores: Tensor, how: SamplingMetadata) -> Tensor:
    """Draw a token (M,) from scores (M, V), of which the largest is 0."""
    floor = torch.where(how.min_p > 0, how.min_p.log(), -torch.inf)
    has_order = ((how.top_k > 0) & (how.top_k < scores.shape[1])) | (how.top_p < 1)
    drawn = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    ordered, others = has_order.nonzero()[:, 0], (~has_order).nonzero()[:, 0]
    if len(ordered):
        drawn[ordered] = _draw_by_order(
            scores[ordered], floor[ordered], how.of(ordered), NUM_CANDIDATES
        )
    if len(others):
        drawn[others] = _draw_from_all(floor[others], scores[others], how.keys[others])
    return drawn


def _draw_from_all(threshold: Tensor, scores: Tensor, keys: Tensor) -> Tensor:
    """Draw (M,) among all tokens whose score (M, V) is not below (M,)."""
    noisy = gumbel(keys, torch.arange(scores.shape[1], device=scores.device))
    noisy += scores
    if threshold.isfinite().any():
        noisy.masked_fill_(scores < threshold.unsqueeze(1), -torch.inf)
    return noisy.max(1).indices  # the lowest token of equals


def _draw_by_order(
    scores: Tensor, floor: Tensor, how: SamplingMetadata, num_candidates: int
) -> Tensor:
    """Draw (M,) where top-k or top-p is on, which needs the most likely tokens in order.

    A row whose threshold is not among the candidates, or is the last of them, does it again with
    more of them.
    """
    num_tokens = scores.shape[1]
    limits = torch.where((how.top_k > 0) & (how.top_k < num_tokens), how.top_k, 0)
    num_candidates = min(max(num_candidates, int(limits.max())), num_tokens)
    if num_candidates < num_tokens:
        best, token_ids = scores.topk(num_candidates)  # (M, C), falling
    else:
        best, token_ids = scores.sort(descending=True)
    kth = best.gather(1, (limits - 1).clamp(min=0).unsqueeze(1))[:, 0]
    floor = torch.where(limits > 0, torch.maximum(floor, kth), floor)
    total = torch.where(scores >= floor.unsqueeze(1), scores.exp(), 0).sum(1, dtype=torch.float64)
    mass = torch.where(best >= floor.unsqueeze(1), best.exp(), 0).double()
    mass_before = mass.cumsum(1) - mass
    num_kept = (mass_before < (how.top_p.double() * total).unsqueeze(1)).sum(1).clamp(min=1)
    nucleus = best.gather(1, (num_kept - 1).unsqueeze(1))[:, 0]
    threshold = torch.where(how.top_p < 1, torch.maximum(floor, nucleus), floor)
    drawn = _draw_from(threshold, best, token_ids, how.keys)
    again = (threshold <= best[:, -1]).nonzero()[:, 0]
    if len(again) and num_candidates < num_tokens:
        drawn[again] = _draw_by_order(
            scores[again], floor[again], how.of(again), 16 * num_candidates
        )
    return drawn


def _draw_from(threshold: Tensor, scores: Tensor, token_ids: Tensor, keys: Tensor) -> Tensor:
    """Draw (M,) among those of the tokens (M, C) whose score (M, C) is not below (M,)."""
    noisy = scores + gumbel(keys, token_ids)
    noisy.masked_fill_(scores < threshold.unsqueeze(1), -torch.inf)
    is_largest = noisy == noisy.amax(1, keepdim=True)
    no_token = torch.iinfo(torch.int64).max
    return torch.where(is_largest, token_ids, no_token).amin(1)  # the lowest token of equals
