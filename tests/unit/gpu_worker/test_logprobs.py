"""Log-probabilities are the reference model's, whatever the schedule does and whoever else asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.logprobs import LOWEST, MeasuredLogits
from gpu_worker.model_runner import ModelRunner
from gpu_worker.sampling_columns import SamplingColumns
from tests.fakes import tiny_models
from tests.fakes.schedules import execute, play, random_prompts
from tests.fakes.step_driver import GREEDY, StepDriver
from wire.logprobs import LogprobRecord, read_records
from wire.messages import ModelRunnerOutput, SamplingParams, token_ids

TOLERANCE = 1e-3  # in float32
NUM_TOKENS = 12

BIASED = {"bias_token_ids": token_ids([5]), "bias_values": [100.0]}
ASKING = [
    replace(GREEDY, logprobs=0),
    replace(GREEDY, logprobs=5),
    GREEDY,
    replace(GREEDY, logprobs=20, prompt_logprobs=3),
    replace(GREEDY, prompt_logprobs=0),
    SamplingParams(max_tokens=99, temperature=1.5, seed=3, logprobs=1),
    replace(GREEDY, logprobs=2, **BIASED),
]


def reference_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Row i: log-probabilities of the token behind tokens [0, i]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0].log_softmax(-1)


def test_records_are_the_reference_models(
    make_runner: Callable[..., ModelRunner], tiny_folder: Callable[[str], Path]
) -> None:
    model = tiny_models.reference(tiny_folder("llama"))
    prompts = random_prompts(len(ASKING), seed=8)
    heard: dict[tuple[int, int], LogprobRecord] = {}

    def hear(result: ModelRunnerOutput) -> None:
        for one in result.logprobs:
            how = ASKING[one.req - 1]
            k = how.prompt_logprobs if one.start < 0 else how.logprobs
            assert k is not None, "nobody asked"
            for index, record in enumerate(read_records(one.records, k), one.start):
                assert len(record.top) == k
                heard[one.req, index] = record

    outputs = play(make_runner(), prompts, ASKING, NUM_TOKENS, seed=2, hear=hear)
    for req, (prompt, output, how) in enumerate(
        zip(prompts, outputs, ASKING, strict=True), start=1
    ):
        expected = reference_logprobs(model, prompt + output)
        indices = {index for one, index in heard if one == req}
        if how.prompt_logprobs is not None:
            assert indices >= set(range(1 - len(prompt), 0))
        if how.logprobs is not None:
            assert indices >= set(range(NUM_TOKENS))
        for index in indices & set(range(1 - len(prompt), NUM_TOKENS)):
            row = expected[len(prompt) + index - 1]
            check(heard[req, index], row, (prompt + output)[len(prompt) + index])


def check(record: LogprobRecord, row: torch.Tensor, token: int) -> None:
    assert record.token_id == token
    assert record.logprob == pytest.approx(float(row[token]), abs=TOLERANCE)
    num_better = int((row > row[token] + TOLERANCE).sum())
    num_no_worse = int((row >= row[token] - TOLERANCE).sum())
    assert num_better < record.rank <= num_no_worse
    best = row.topk(len(record.top)).values
    values = torch.tensor([logprob for _, logprob in record.top])
    torch.testing.assert_close(values, best, rtol=0, atol=TOLERANCE)
    for token_id, logprob in record.top:
        assert logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)


@pytest.mark.parametrize("wish", [{"logprobs": 2}, {"prompt_logprobs": 2}])
def test_whoever_comes_after_one_who_asked_gets_none(
    wish: dict[str, int], make_runner: Callable[..., ModelRunner]
) -> None:
    runner = make_runner(max_num_seqs=1)  # so they have the same row
    driver = StepDriver(runner.capacity.num_blocks, runner.capacity.block_size)
    driver.add(1, [1, 2, 3], replace(GREEDY, **wish))
    driver.add(2, [1, 2, 3])
    results = []
    for step in (driver.step({1: 3}), driver.step({2: 3}, finish=(1,)), driver.step()):
        results.append(execute(runner, step))
        driver.take(results[-1])
    assert [one.req for result in results for one in result.logprobs] == [1]


def test_what_no_number_can_say_is_a_floor() -> None:
    columns = SamplingColumns(1)
    columns.num_logprobs[0] = 3
    states = SimpleNamespace(sampling=columns, reqs=[7])
    logits = torch.tensor([[0.0, -torch.inf, -50_000.0]])
    first = np.zeros(1, dtype=np.int64)
    measured = MeasuredLogits(states, first, first, logits)  # type: ignore[arg-type]  # enough
    [one] = measured.logprobs_of(torch.tensor([1]))
    [read] = read_records(one.records, 3)
    assert (read.logprob, read.rank) == (LOWEST, 3)
    assert sorted(logprob for _, logprob in read.top) == [LOWEST, LOWEST, 0.0]
