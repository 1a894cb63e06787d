"""Sampling: which tokens may be drawn, how often each is, and on what a draw depends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker import sampler
from gpu_worker.sampler import NO_TOKEN, gumbel, make_metadata, row_keys, sample
from gpu_worker.sampling_columns import SamplingColumns
from wire.messages import NewRequestData, SamplingParams, token_ids

CPU = torch.device("cpu")


def draw(
    logits: Tensor, params: list[SamplingParams], output_index: list[int] | None = None
) -> Tensor:
    """Sample each row (N, V) by its parameters."""
    columns = SamplingColumns(len(params))
    for row, one in enumerate(params):
        columns.fill(row, NewRequestData(row, token_ids(), token_ids(), [], 0, 0, one))
    index = np.array(output_index if output_index is not None else [0] * len(params))
    return sample(logits, make_metadata(columns, np.arange(len(params)), index, CPU))


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)


def draws(logits: Tensor, how: SamplingParams, count: int) -> Tensor:
    """Output tokens 0, 1, … of one request that always sees the same logits (V,)."""
    rows = logits.expand(count, -1)
    return draw(rows, [how] * count, list(range(count)))


def test_greedy_takes_the_lowest_token_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    for dtype in (torch.float32, torch.bfloat16):
        found = draw(logits.to(dtype), [params(temperature=0.0)] * 2)
        assert found.tolist() == [1, 0]


@pytest.mark.parametrize("num_tokens", [100, 256, 640])
def test_greedy_takes_the_largest_in_a_vocabulary_of_any_size(num_tokens: int) -> None:
    logits = torch.randn(4, num_tokens, generator=torch.Generator().manual_seed(3))
    logits[2, [num_tokens - 1, 70, 71]] = 9.0  # equals
    expected = [int(row.argmax()) for row in logits]
    expected[2] = 70
    assert draw(logits, [params(temperature=0.0)] * 4).tolist() == expected


@pytest.mark.parametrize("num_tokens", [100, 256])
def test_a_step_in_which_nobody_samples_is_one(num_tokens: int) -> None:
    found = draw(torch.empty(0, num_tokens), [])
    assert found.tolist() == []


def test_an_all_greedy_batch_prepares_nothing_to_draw() -> None:
    assert make_metadata(SamplingColumns(3), np.arange(3), np.zeros(3, np.int64), CPU) is None


def test_greedy_rows_beside_drawing_rows_stay_greedy() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    mixed = [params(temperature=0.0 if row % 2 else 1.0, seed=row) for row in range(6)]
    found = draw(logits, mixed)
    assert found[1::2].tolist() == logits.argmax(-1)[1::2].tolist()


# ---------------------------------------------------------------- filters


def support(logits: list[float], how: SamplingParams) -> set[int]:
    """Which tokens the filters leave, written down plainly: sort, then cut."""
    scaled = [value / how.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    left = set(order)
    if 0 < how.top_k < len(order):
        left = {t for t in left if scaled[t] >= scaled[order[how.top_k - 1]]}
    if how.min_p > 0:
        left = {t for t in left if scaled[t] >= scaled[order[0]] + math.log(how.min_p)}
    if how.top_p < 1:
        weight = {t: math.exp(scaled[t] - scaled[order[0]]) for t in left}
        mass, total, last = 0.0, sum(weight.values()), order[0]
        for token in [t for t in order if t in left]:
            if mass >= how.top_p * total:
                break
            mass, last = mass + weight[token], token
        left = {t for t in left if scaled[t] >= scaled[last]}
    return left


FILTERS = {
    "none": params(),
    "hot": params(temperature=2.5),
    "top_k": params(top_k=3),
    "top_k 1": params(top_k=1),
    "top_k of all": params(top_k=12),
    "top_k beyond all": params(top_k=10**9),
    "top_p": params(top_p=0.6),
    "tiny top_p": params(top_p=1e-6),
    "min_p": params(min_p=0.2),
    "top_k and top_p": params(top_k=5, top_p=0.7),
    "top_k and min_p": params(top_k=5, min_p=0.3),
    "all of them, cool": params(temperature=0.6, top_k=6, top_p=0.8, min_p=0.05),
}


@pytest.mark.parametrize("how", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("num_candidates", [2, 512])
def test_exactly_what_the_filters_leave_is_drawn(
    how: SamplingParams, num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "NUM_CANDIDATES", num_candidates)
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 0.8
    found = set(draws(logits, how, 4000).tolist())
    assert found == support(logits.tolist(), how)


@pytest.mark.parametrize(
    "how", [params(top_k=2), params(top_p=0.5), params(min_p=1.0)], ids=["top_k", "top_p", "min_p"]
)
@pytest.mark.parametrize("num_candidates", [1, 2, 512])
def test_tokens_as_likely_as_the_last_one_kept_are_kept(
    how: SamplingParams, num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "NUM_CANDIDATES", num_candidates)
    logits = torch.tensor([1.0, 1.0, -9.0, 1.0, 1.0])
    assert set(draws(logits, how, 500).tolist()) == {0, 1, 3, 4}


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0])
    for how in (params(), params(top_p=0.99), params(top_k=3)):
        assert set(draws(logits, how, 500).tolist()) == {1, 3}


def test_an_almost_zero_temperature_is_greedy() -> None:
    logits = torch.tensor([0.1, 0.3, 0.2])
    assert set(draws(logits, params(temperature=1e-30), 50).tolist()) == {1}


# ---------------------------------------------------------------- how often


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_tokens_are_drawn_as_often_as_their_probability_says(seed: int) -> None:
    """20,000 draws; 40.8 is exceeded once in 100,000 times with 10 degrees of freedom."""
    logits = torch.linspace(-2.0, 2.0, 11)
    counts = draws(logits, params(seed=seed), 20_000).bincount(minlength=11)
    assert chi_square(counts, logits.softmax(-1)) < 40.8


def test_different_seeds_draw_independently() -> None:
    """The same over seeds, for one output index."""
    logits = torch.linspace(-2.0, 2.0, 11)
    many = [params(seed=seed) for seed in range(20_000)]
    counts = draw(logits.expand(20_000, -1), many).bincount(minlength=11)
    assert chi_square(counts, logits.softmax(-1)) < 40.8


def test_a_draw_says_nothing_about_the_next() -> None:
    """Pairs of successive draws of 4 tokens: 16 cells, 49.9 is exceeded once in 100,000 times."""
    found = draws(torch.zeros(4), params(seed=5), 20_000)
    pairs = (found[:-1] * 4 + found[1:]).bincount(minlength=16)
    assert chi_square(pairs, torch.full((16,), 1 / 16)) < 49.9


# ---------------------------------------------------------------- on what a draw depends


def test_a_draw_does_not_depend_on_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 60
    logits = torch.randn(count, 3000, generator=torch.Generator().manual_seed(4)) * 4
    kinds = list(FILTERS.values())
    many = [
        SamplingParams(
            1, how.temperature, top_p=how.top_p, top_k=how.top_k, min_p=how.min_p, seed=row
        )
        for row, how in enumerate((kinds * 5)[:count])
    ]
    together = draw(logits, many, list(range(count)))
    alone = [draw(logits[i : i + 1], [many[i]], [i]) for i in range(count)]
    assert together.tolist() == torch.cat(alone).tolist()
    monkeypatch.setattr(sampler, "_ELEMENTS_AT_ONCE", 1)
    assert draw(logits, many, list(range(count))).tolist() == together.tolist()


def test_a_draw_does_not_touch_the_generators_of_torch() -> None:
    before = torch.random.get_rng_state()
    first = draws(torch.zeros(50), params(seed=1), 20)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(123)
    assert draws(torch.zeros(50), params(seed=1), 20).tolist() == first.tolist()


def test_the_noise_is_the_documented_hash() -> None:
    seeds, indices, tokens = [0, 7, 2**64 - 1], [0, 5, 10**6], [0, 1, 255, 49151, 2**20]
    keys = row_keys(np.array(seeds, dtype=np.uint64), np.array(indices))
    found = gumbel(torch.from_numpy(keys), torch.tensor(tokens))
    for row, (seed, index) in enumerate(zip(seeds, indices, strict=True)):
        for column, token in enumerate(tokens):
            expected = documented_noise(seed, index, token)
            assert float(found[row, column]) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def documented_noise(seed: int, index: int, token: int) -> float:
    def splitmix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    key = splitmix((splitmix(seed) + (index + 1) * 0x9E3779B97F4A7C15) % 2**64)
    bits = (token * (key >> 32 | 1) + key) % 2**32
    bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
    bits = (bits ^ bits >> 16) % 2**31
    return -math.log(-math.log1p(-(bits + 0.5) / 2**31))


# ---------------------------------------------------------------- logits that are no numbers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", [params(temperature=0.0), params(), params(top_k=3, top_p=0.5)])
def test_a_row_that_is_not_finite_is_reported_and_the_others_are_unharmed(
    bad: float, how: SamplingParams
) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(6))
    expected = draw(logits, [how] * 3).tolist()
    sick = logits.clone()
    sick[1, :] = bad
    found = draw(sick, [how] * 3)
    assert found.tolist() == [expected[0], NO_TOKEN, expected[2]]


def test_one_nan_among_the_logits_is_enough() -> None:
    logits = torch.zeros(1, 20)
    logits[0, 13] = math.nan
    assert draw(logits, [params()]).tolist() == [NO_TOKEN]
