"""The sampler of a GPU worker draws what that of a CPU worker draws, for any mixture of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpu_worker import device_sampler, sampler
from gpu_worker.sampling_columns import SamplingColumns
from wire.messages import NewRequestData, SamplingParams, token_ids

VOCAB = 300
HOW = [
    SamplingParams(max_tokens=1, temperature=0.0, seed=1),
    SamplingParams(max_tokens=1, temperature=0.7, top_k=20, seed=2**63 - 1),
    SamplingParams(max_tokens=1, temperature=1.3, top_p=0.9, seed=3),
    SamplingParams(max_tokens=1, temperature=1.0, min_p=0.05, seed=-7),
    SamplingParams(max_tokens=1, temperature=1.0, top_k=2**31, seed=2**64 + 5),  # all tokens
]


def columns_of(params: list[SamplingParams]) -> SamplingColumns:
    columns = SamplingColumns(len(params))
    for row, sampling in enumerate(params):
        columns.fill(row, NewRequestData(row, token_ids(), token_ids(), [], 0, 0, sampling))
    return columns


@pytest.mark.parametrize("rows", [[0], [1, 2], [4, 0, 3, 2, 1], [0, 0, 0]], ids=str)
def test_it_draws_what_the_sampler_of_the_cpu_draws(rows: list[int]) -> None:
    columns, chosen = columns_of(HOW), np.array(rows)
    logits, index = torch.randn(len(rows), VOCAB), np.arange(len(rows)) * 3
    metadata = sampler.make_metadata(columns, chosen, index, logits.device)
    expected = sampler.sample(logits, metadata)
    found = device_sampler.sample(logits, columns, chosen, index)
    assert found.tolist() == expected.tolist()
    assert sampler.NO_TOKEN not in found.tolist()


def test_rows_that_are_no_numbers_harm_nobody() -> None:
    columns, rows = columns_of(HOW), np.arange(5)
    logits = torch.randn(5, VOCAB)
    clean = device_sampler.sample(logits, columns, rows, rows).tolist()
    logits[1, 7], logits[3] = torch.nan, -torch.inf
    found = device_sampler.sample(logits, columns, rows, rows)
    none = sampler.NO_TOKEN
    assert found.tolist() == [clean[0], none, clean[2], none, clean[4]]
