"""From logits to tokens without sorting: penalties, temperature, top-k, min-p, top-p, and the draw.

One program a row; nothing of a result depends on the batch. A filter is a threshold: tokens that
are as likely as the last one kept are kept too. A row reads its logits a few times:

    1  penalties; the largest, and whether all are numbers        a greedy row ends here
    2  scores (logit - largest) / temperature                     only where order is needed
    3  top-k: the k-th largest by radix select, eight bits a time
    4  top-p: the smallest of the kept by bisection over the scores
    5  the largest of score + noise among those above the threshold

A row whose largest logit is no finite number, or that has a NaN, is reported and draws token 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.draw import Draw, Penalties
from kernels.gumbel import gumbel
from kernels.paged_cache import FLOATS, check
from kernels.target import can_launch

_BLOCK = 4096  # tokens that one program looks at together
_SIGN = tl.constexpr(-(2**31))
_NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """Numbers float32 as int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key: tl.tensor) -> tl.tensor:
    """Undo `_ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _logits(
    logits_ptr: tl.tensor,  # (V,) of the row
    tokens: tl.tensor,  # (C,)
    vocab_size: tl.tensor,
    counts_ptr: tl.tensor,  # (V,) of the row, or None
    in_prompt_ptr: tl.tensor,  # (ceil(V / 32),) of the row
    slot: tl.tensor,  # below 0: no penalties
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
) -> tl.tensor:
    """Logits (C,) float32 after penalties; -inf beyond the vocabulary."""
    is_token = tokens < vocab_size
    x = tl.load(logits_ptr + tokens, mask=is_token, other=float("-inf")).to(tl.float32)
    if counts_ptr is not None:
        is_asked = is_token & (slot >= 0)
        count = tl.load(counts_ptr + tokens, mask=is_asked, other=0)
        word = tl.load(in_prompt_ptr + tokens // 32, mask=is_asked, other=0)
        is_out = count > 0
        is_seen = is_out | (((word >> (tokens % 32)) & 1) == 1)
        x = tl.where(is_seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
        x = x - frequency * count.to(tl.float32)
        x = x - tl.where(is_out, presence, 0.0)
    return x


@triton.jit
def _kth_largest(
    scores_ptr: tl.tensor, vocab_size: tl.tensor, k: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The k-th largest of scores (V,), found eight bits at a time, from the highest on."""
    digits = tl.arange(0, 256)
    prefix = tl.zeros([], tl.int32)
    wanted = k
    for shift in tl.static_range(24, -1, -8):
        histogram = tl.zeros([256], tl.int32)
        for first in tl.range(0, vocab_size, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            is_match = tokens < vocab_size
            x = tl.load(scores_ptr + tokens, mask=is_match, other=float("-inf"))
            key = (_ordered(x) ^ _SIGN).to(tl.uint32, bitcast=True)
            if shift < 24:
                is_match = is_match & ((key >> (shift + 8)).to(tl.int32) == prefix)
            digit = ((key >> shift) & 255).to(tl.int32)
            histogram += tl.histogram(digit, 256, mask=is_match)
        above = tl.sum(histogram, 0) - tl.cumsum(histogram, 0)  # (256,) how many are in higher bins
        found = tl.sum((above >= wanted).to(tl.int32), 0)
        wanted = wanted - tl.sum(tl.where(digits == found, above, 0), 0)
        prefix = (prefix << 8) | found
    return _number(prefix ^ _SIGN)


@triton.jit
def _nucleus(
    scores_ptr: tl.tensor,
    vocab_size: tl.tensor,
    floor: tl.tensor,
    top_p: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The smallest of the likeliest scores that together hold top_p of the mass from `floor` on.

    It is the smallest score of which those above it hold less than that. `low` and `high` are
    always scores that are there, so that the search ends, and ends exactly.
    """
    masses = tl.zeros([BLOCK], tl.float32)
    lowest = tl.full([BLOCK], float("inf"), tl.float32)
    for first in tl.range(0, vocab_size, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        x = tl.load(scores_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
        is_kept = (x >= floor) & (tokens < vocab_size)
        masses += tl.where(is_kept, tl.exp(x), 0.0)
        lowest = tl.minimum(lowest, tl.where(is_kept, x, float("inf")))
    wanted = top_p * tl.sum(masses, 0)
    low = tl.min(lowest, 0)
    high = tl.zeros([], tl.float32)  # the largest score
    while low < high:
        low_key = _ordered(low)
        high_key = _ordered(high)
        middle = _number((low_key >> 1) + (high_key >> 1) + (low_key & high_key & 1))
        masses = tl.zeros([BLOCK], tl.float32)
        highest_below = tl.full([BLOCK], float("-inf"), tl.float32)
        lowest_above = tl.full([BLOCK], float("inf"), tl.float32)
        for first in tl.range(0, vocab_size, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            x = tl.load(scores_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
            is_above = x > middle
            masses += tl.where(is_above, tl.exp(x), 0.0)
            highest_below = tl.maximum(highest_below, tl.where(is_above, float("-inf"), x))
            lowest_above = tl.minimum(lowest_above, tl.where(is_above, x, float("inf")))
        if tl.sum(masses, 0) >= wanted:
            low = tl.min(lowest_above, 0)
        else:
            high = tl.max(highest_below, 0)
    return low


@triton.jit(do_not_specialize=["vocab_size"])
def _sample(
    tokens_ptr: tl.tensor,  # (N,) int64
    is_finite_ptr: tl.tensor,  # (N,) bool
    logits_ptr: tl.tensor,  # (N, V)
    scores_ptr: tl.tensor,  # (N, V) float32, to be written
    temperature_ptr: tl.tensor,  # (N,)
    top_k_ptr: tl.tensor,  # (N,)
    top_p_ptr: tl.tensor,  # (N,)
    min_p_ptr: tl.tensor,  # (N,)
    keys_ptr: tl.tensor,  # (N, 2)
    slots_ptr: tl.tensor,  # (N,) or None, as all that follow
    repetition_ptr: tl.tensor,  # (N,)
    frequency_ptr: tl.tensor,  # (N,)
    presence_ptr: tl.tensor,  # (N,)
    counts_ptr: tl.tensor,  # (R, V)
    in_prompt_ptr: tl.tensor,  # (R, ceil(V / 32))
    vocab_size: tl.tensor,
    stride_logits: tl.int64,
    stride_scores: tl.int64,
    stride_counts: tl.int64,
    stride_in_prompt: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """Sample one row."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    scores_ptr += row * stride_scores
    slot = -1
    repetition = 1.0
    frequency = 0.0
    presence = 0.0
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        counts_ptr += tl.maximum(slot, 0) * stride_counts
        in_prompt_ptr += tl.maximum(slot, 0) * stride_in_prompt
        repetition = tl.load(repetition_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)

    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.arange(0, BLOCK)
    num_nans = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, vocab_size, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        x = _logits(
            logits_ptr, tokens, vocab_size, counts_ptr, in_prompt_ptr, slot,
            repetition, frequency, presence,
        )  # fmt: skip
        num_nans += (x != x).to(tl.int32)  # noqa: PLR0124 - only a NaN differs from itself
        best_token = tl.where(x > best, tokens, best_token)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    is_finite = (tl.sum(num_nans, 0) == 0) & (tl.abs(largest) < float("inf"))
    tl.store(is_finite_ptr + row, is_finite)
    temperature = tl.load(temperature_ptr + row)
    if (temperature == 0.0) | (is_finite == 0):
        token = tl.min(tl.where(best == largest, best_token, _NO_TOKEN), 0)
        tl.store(tokens_ptr + row, tl.where(is_finite, token, 0).to(tl.int64))
        return

    min_p = tl.load(min_p_ptr + row)
    threshold = tl.where(min_p > 0.0, tl.log(min_p), float("-inf"))
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if has_top_k | (top_p < 1.0):
        for first in tl.range(0, vocab_size, BLOCK):
            tokens = first + tl.arange(0, BLOCK)
            x = _logits(
                logits_ptr, tokens, vocab_size, counts_ptr, in_prompt_ptr, slot,
                repetition, frequency, presence,
            )  # fmt: skip
            x = tl.div_rn(x - largest, temperature)
            tl.store(scores_ptr + tokens, x, mask=tokens < vocab_size)
        tl.debug_barrier()  # what one thread wrote, another reads
        if has_top_k:
            kth = _kth_largest(scores_ptr, vocab_size, top_k.to(tl.int32), BLOCK)
            threshold = tl.maximum(threshold, kth)
        if top_p < 1.0:
            threshold = _nucleus(scores_ptr, vocab_size, threshold, top_p, BLOCK)

    multiplier = tl.load(keys_ptr + row * 2)
    offset = tl.load(keys_ptr + row * 2 + 1)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.arange(0, BLOCK)
    for first in tl.range(0, vocab_size, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        x = _logits(
            logits_ptr, tokens, vocab_size, counts_ptr, in_prompt_ptr, slot,
            repetition, frequency, presence,
        )  # fmt: skip
        x = tl.div_rn(x - largest, temperature)
        noisy = tl.where(x >= threshold, x + gumbel(multiplier, offset, tokens), float("-inf"))
        best_token = tl.where(noisy > best, tokens, best_token)
        best = tl.maximum(best, noisy)
    token = tl.min(tl.where(best == tl.max(best, 0), best_token, _NO_TOKEN), 0)
    tl.store(tokens_ptr + row, token.to(tl.int64))


def sample(
    logits: Tensor, how: Draw, penalties: Penalties | None = None, *, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Sample one token for each row of logits (N, V), which stay as they are.

    Returns the tokens (N,) int64, and whether each row's logits were numbers (N,) bool; where they
    were not, the token is 0 and means nothing. Raises ValueError for operands that do not fit.
    """
    num_rows, vocab_size = logits.shape
    check("logits", logits, (None, None), FLOATS)
    how.check(num_rows, logits.device)
    if penalties is not None:
        penalties.check(num_rows, vocab_size, logits.device)
    if not can_launch(logits):
        return reference.sample(logits, how, penalties)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if not num_rows:
        return tokens, is_finite
    scores = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    _sample[(num_rows,)](
        tokens,
        is_finite,
        logits,
        scores,
        how.temperature,
        how.top_k,
        how.top_p,
        how.min_p,
        how.keys,
        *_pointers(penalties),
        vocab_size,
        logits.stride(0),
        scores.stride(0),
        0 if penalties is None else penalties.counts.stride(0),
        0 if penalties is None else penalties.in_prompt.stride(0),
        BLOCK=block or (_BLOCK if penalties is None else _BLOCK // 2),
        num_warps=16,
        enable_fp_fusion=False,  # scores and noise are those of every other device
    )
    return tokens, is_finite


def _pointers(penalties: Penalties | None) -> tuple[Tensor | None, ...]:
    if penalties is None:
        return (None,) * 6
    return (
        penalties.slots,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
        penalties.counts,
        penalties.in_prompt,
    )
