"""The compiled sampler draws what the one in torch draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.native_sampler import NativeSampler
from gpu_worker.sampler import NO_TOKEN, sample_in_torch
from gpu_worker.sampling_columns import SamplingColumns

ROWS = 24
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.01},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 1e-6},
    {"temperature": 1.0, "top_p": 0.9999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.3, "top_k": 200, "top_p": 0.8, "min_p": 0.001},
]


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeSampler:
    return NativeSampler(tmp_path_factory.mktemp("sampler"))


def columns_of(seed: int, **settings: Any) -> SamplingColumns:
    columns = SamplingColumns(ROWS)
    for name, value in settings.items():
        getattr(columns, name)[:] = value
    columns.seed[:] = np.random.default_rng(seed).integers(0, 2**63, ROWS)
    return columns


def drawn(native: NativeSampler, logits: Tensor, columns: SamplingColumns) -> list[int]:
    """What both draw, which is the same."""
    rows, index = np.arange(ROWS)[::-1].copy(), np.arange(ROWS) * 7
    ours, torchs = (s(logits, columns, rows, index).tolist() for s in (native, sample_in_torch))
    assert ours == torchs
    return ours


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("vocab_size", "spread"), [(1000, 3.0), (49152, 4.0), (333, 0.0), (5, 9)])
def test_both_draw_the_same(
    native: NativeSampler, settings: dict[str, Any], vocab_size: int, spread: float
) -> None:
    seed = vocab_size + SETTINGS.index(settings)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, vocab_size, generator=generator) * spread - 7
    drawn(native, logits, columns_of(seed, **settings))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_banned_is_never_drawn(native: NativeSampler, settings: dict[str, Any]) -> None:
    logits = torch.full((ROWS, 1000), -torch.inf)
    allowed = [3, 500, 999]
    logits[:, allowed] = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1)) * 50
    assert set(drawn(native, logits, columns_of(2, **settings))) <= {*allowed}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, "all banned"])
def test_a_row_that_is_no_numbers_is_told_and_harms_no_other(
    native: NativeSampler, temperature: float, bad: float | str
) -> None:
    logits = torch.randn(ROWS, 777, generator=torch.Generator().manual_seed(3))
    columns = columns_of(4, temperature=temperature, top_p=0.9)
    before = drawn(native, logits, columns)
    if isinstance(bad, str):
        logits[5] = -torch.inf
    else:
        logits[5, 776] = bad
    after = drawn(native, logits, columns)
    assert after == [*before[:5], NO_TOKEN, *before[6:]]


def test_of_equals_the_lowest_token_is_taken(native: NativeSampler) -> None:
    logits = torch.zeros(ROWS, 100)
    logits[:, [40, 41, 90]] = 8.0
    assert drawn(native, logits, columns_of(5)) == [40] * ROWS


def test_tokens_are_drawn_as_often_as_they_are_likely(native: NativeSampler) -> None:
    num_draws = 20000
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    columns = SamplingColumns(1)
    columns.temperature[:] = 1.0
    columns.seed[:] = 11
    rows = np.zeros(num_draws, dtype=np.int64)
    logits = shares.log().expand(num_draws, 4)
    tokens = native(logits, columns, rows, np.arange(num_draws))
    counts = torch.bincount(tokens, minlength=4)
    expected = shares * num_draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # chi-square, 3, p = 0.001
