"""Sampling without a sort draws what sampling with one draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker import sampler
from kernels import reference
from kernels.draw import Draw, Penalties
from kernels.sampling import sample

NUM_TOKENS = 1000
FILTERS = {  # top_k, top_p, min_p
    "none": (0, 1.0, 0.0),
    "top-k": (20, 1.0, 0.0),
    "top-k of one": (1, 1.0, 0.0),
    "top-p": (0, 0.9, 0.0),
    "top-p of nothing": (0, 0.0, 0.0),
    "min-p": (0, 1.0, 0.1),
    "top-k, top-p": (50, 0.8, 0.0),
    "all": (300, 0.95, 0.001),
}


def make_draw(rows: int, *, temperature: float = 1.0, top_k=0, top_p=1.0, min_p=0.0) -> Draw:
    def column(value: float) -> Tensor:
        return torch.full((rows,), value, dtype=torch.float32)

    seeds = np.arange(rows, dtype=np.uint64) * np.uint64(7919)
    keys = torch.from_numpy(sampler.row_keys(seeds, np.arange(rows)))
    ks = torch.full((rows,), top_k)
    return Draw(column(temperature), ks, column(top_p), column(min_p), keys)


def flat_logits(rows: int) -> Tensor:
    """Many tokens are likely, so that what a filter keeps shows in what is drawn."""
    return torch.randn(rows, NUM_TOKENS)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    top_k, top_p, min_p = FILTERS[name]
    logits = flat_logits(6).to(dtype)  # in bfloat16 many are equal
    how = make_draw(6, temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, is_finite = sample(logits, how, block=512)
    assert torch.equal(tokens, reference.sample(logits, how)[0])
    assert is_finite.all()


@pytest.mark.parametrize("name", FILTERS)
def test_what_is_kept_is_what_a_sort_keeps(name: str) -> None:
    """Keep every token once: give each in turn noise that beats all others, by its logit."""
    top_k, top_p, min_p = FILTERS[name]
    logits = flat_logits(1)
    how = make_draw(1, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = logits - logits.max()
    bound = reference.threshold(scores, how)
    kept = set((scores[0] >= bound).nonzero()[:, 0].tolist())
    assert kept == kept_by_sorting(scores[0], top_k, top_p, min_p)


def kept_by_sorting(scores: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition, in Python, one token after the other."""
    ranked = sorted(range(len(scores)), key=lambda token: -scores[token].item())
    if top_k:
        ranked = ranked[:top_k]
    weights = scores.double().exp()
    if min_p:
        ranked = [token for token in ranked if weights[token] >= min_p * weights.max()]
    total, before, kept = weights[ranked].sum(), 0.0, set()
    for token in ranked:
        if top_p < 1 and kept and before >= top_p * total:
            break
        kept.add(token)
        before += weights[token]
    return kept


def test_draws_are_those_of_the_sampler_on_the_cpu() -> None:
    rows = 12
    logits = flat_logits(rows)
    combinations = list(FILTERS.values())
    columns = [combinations[i % len(combinations)] for i in range(rows)]
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*columns, strict=True))
    temperature = torch.linspace(0.0, 1.5, rows)  # the first row is greedy
    keys = make_draw(rows).keys
    how = Draw(temperature, top_k, top_p.float(), min_p.float(), keys)
    drawing = torch.arange(1, rows)
    metadata = sampler.SamplingMetadata(
        drawing, temperature[1:], top_k[1:], how.top_p[1:], how.min_p[1:], keys[1:]
    )
    expected = sampler.sample(logits, metadata)
    assert torch.equal(reference.sample(logits, how)[0], expected)
    assert torch.equal(sample(logits, how, block=1024)[0], expected)


def test_noise_is_that_of_the_sampler_on_the_cpu_bit_by_bit() -> None:
    keys, tokens = make_draw(50).keys, torch.arange(3000)
    assert torch.equal(reference.gumbel(keys, tokens), sampler.gumbel(keys, tokens))


def test_a_row_is_drawn_the_same_in_any_batch() -> None:
    logits, how = flat_logits(4), make_draw(4, top_k=100, top_p=0.9)
    together, _ = sample(logits, how, block=512)
    columns = (how.temperature, how.top_k, how.top_p, how.min_p, how.keys)
    alone, _ = sample(logits[2:3], Draw(*(column[2:3] for column in columns)), block=512)
    assert alone[0] == together[2]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(2, NUM_TOKENS)
    logits[0, [700, 300, 900]] = 5.0
    tokens, _ = sample(logits, make_draw(2, temperature=0.0), block=256)
    assert tokens.tolist() == [300, 0]


def test_equals_of_the_last_kept_are_kept() -> None:
    logits = torch.full((40, 64), -5.0)
    logits[:, 10:14] = 1.0
    tokens, _ = sample(logits, make_draw(40, top_k=2), block=64)
    assert set(tokens.tolist()) == {10, 11, 12, 13}


def test_a_token_is_left_out_when_those_above_it_hold_exactly_top_p() -> None:
    logits = torch.full((30, 64), -torch.inf)
    logits[:, 20], logits[:, 10] = 0.0, -(2.0**-27)  # as likely in float32, and yet in order
    how = make_draw(30, top_p=0.5)
    assert (sample(logits, how, block=64)[0] == 20).all()
    assert (reference.sample(logits, how)[0] == 20).all()


def test_rows_that_are_no_numbers_are_reported_and_harm_nobody() -> None:
    logits = flat_logits(6)
    clean, _ = sample(logits, make_draw(6, top_p=0.9), block=1024)
    logits[1, 999] = torch.nan
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    logits[4, 100:] = -torch.inf  # a mask is no error
    tokens, is_finite = sample(logits, make_draw(6, top_p=0.9), block=1024)
    assert is_finite.tolist() == [True, False, False, False, True, True]
    assert tokens[1:4].tolist() == [0, 0, 0]
    assert tokens[4] < 100
    assert torch.equal(tokens[[0, 5]], clean[[0, 5]])
    assert torch.equal(tokens, reference.sample(logits, make_draw(6, top_p=0.9))[0])


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((8, 64), -torch.inf)
    logits[:, 7] = -30.0
    for filters in ({}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.01}):
        tokens, _ = sample(logits, make_draw(8, temperature=5.0, **filters), block=64)
        assert (tokens == 7).all()


def test_draws_follow_the_softmax() -> None:
    """Chi-square with three degrees of freedom: above 16.3 once in a thousand, for other seeds."""
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5])
    rows = 20_000
    expected = logits.softmax(0) * rows
    drawn, _ = reference.sample(logits.expand(rows, 4), make_draw(rows))
    counts = torch.bincount(drawn, minlength=4)
    assert ((counts - expected) ** 2 / expected).sum() < 16.3
    few, _ = sample(logits.expand(100, 4), make_draw(100), block=4)
    assert torch.equal(few, drawn[:100])


def test_penalties_are_those_of_the_reference() -> None:
    rows, num_tokens = 4, 100
    logits = torch.randn(rows, num_tokens)
    counts = torch.randint(0, 3, (2, num_tokens), dtype=torch.int32)
    in_prompt = torch.randint(-(2**31), 2**31, (2, 4)).to(torch.int32)
    penalties = Penalties(
        slots=torch.tensor([1, -1, 0, 1], dtype=torch.int32),
        repetition=torch.tensor([1.3, 2.0, 1.0, 0.8]),
        frequency=torch.tensor([0.5, 1.0, -0.2, 0.0]),
        presence=torch.tensor([0.1, 1.0, 0.0, -2.0]),
        counts=counts,
        in_prompt=in_prompt,
    )
    for temperature in (0.0, 1.0):
        how = make_draw(rows, temperature=temperature, top_k=30, top_p=0.9)
        tokens, _ = sample(logits, how, penalties, block=128)
        assert torch.equal(tokens, reference.sample(logits, how, penalties)[0])
    plain, _ = sample(logits, how, block=128)
    assert tokens[1] == plain[1]  # a row without a slot pays nothing


def test_penalties_do_what_they_say() -> None:
    penalties = Penalties(
        slots=torch.tensor([0], dtype=torch.int32),
        repetition=torch.tensor([2.0]),
        frequency=torch.tensor([0.5]),
        presence=torch.tensor([0.25]),
        counts=torch.tensor([[0, 3, 0, 1]], dtype=torch.int32),
        in_prompt=torch.tensor([[0b0101]], dtype=torch.int32),
    )
    penalised = reference.penalised(torch.tensor([[4.0, 4.0, -4.0, -4.0]]), penalties)
    assert penalised.tolist() == [[2.0, 2.0 - 1.5 - 0.25, -8.0, -8.0 - 0.5 - 0.25]]
