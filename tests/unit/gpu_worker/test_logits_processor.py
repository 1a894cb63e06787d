"""Bias, penalties and bans: what a plain implementation says, whatever the schedule does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_worker.logits_processor import LogitsProcessor, TokenCounts
from gpu_worker.model_runner import ModelRunner
from tests.fakes import tiny_models
from tests.fakes.plain_sampling import plain_answer, processed
from tests.fakes.schedules import execute, play, random_prompts
from tests.fakes.step_driver import StepDriver
from wire.messages import NewRequestData, SamplingParams, token_ids

VOCAB = tiny_models.VOCAB


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=99, **{"temperature": 0.0, **fields})


def bias(values: dict[int, float]) -> dict[str, Any]:
    return {"bias_token_ids": token_ids(list(values)), "bias_values": list(values.values())}


def words(*sequences: list[int]) -> list[Any]:
    return [token_ids(sequence) for sequence in sequences]


RULES = {
    "presence": params(presence_penalty=1.5),
    "frequency": params(frequency_penalty=0.7),
    "negative": params(frequency_penalty=-0.2, presence_penalty=-2.0),
    "repetition": params(repetition_penalty=1.3),
    "repetition below 1": params(repetition_penalty=0.8),
    "bias": params(**bias({3: 4.5, 90: -100.0, 17: 2.0})),
    "allowed": params(allowed_token_ids=token_ids(list(range(10, 30)))),
    "bad words": params(bad_words=words(*[[i] for i in range(0, 97, 2)], [5, 7], [9, 9, 9])),
    "min_tokens": params(min_tokens=15, eos_token_ids=list(range(40)), stop_token_ids=[77]),
    "drawn": params(temperature=0.8, top_k=20, repetition_penalty=1.2, seed=5),
    "everything": params(
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        bad_words=words([4], [6, 8]),
        min_tokens=5,
        eos_token_ids=[2],
        **bias({50: 3.0, 51: 3.0}),
    ),
    "nothing": params(),
}


def apply(logits: torch.Tensor, rows: list[tuple[SamplingParams, list[int], list[int]]]) -> Any:
    """Logits (N, V) by the rules of each row: how, prompt, output."""
    processor = LogitsProcessor(logits.shape[1])
    for row, (how, prompt, output) in enumerate(rows):
        new = NewRequestData(row, token_ids(prompt), token_ids(output), [], 0, 0, how)
        processor.add(row, new)
    return processor.apply(logits.clone(), np.arange(len(rows)))


def test_each_row_of_a_batch_follows_its_own_rules() -> None:
    logits = torch.randn(len(RULES), VOCAB, generator=torch.Generator().manual_seed(1)) * 5
    prompt, output = [1, 2, 3, 9, 9], [9, 9, 5, 5, 5, 60]
    rows = [(how, prompt, output) for how in RULES.values()]
    found = apply(logits, rows)
    for row, how in enumerate(RULES.values()):
        expected = processed(logits[row], how, prompt, output)
        torch.testing.assert_close(found[row], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[-1], logits[-1])


def test_tokens_may_be_noted_one_by_one_or_come_with_the_request() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    how, prompt, output = RULES["everything"], list(range(80)), [5, 6, 5, 6, 70, 6]
    processor = LogitsProcessor(VOCAB)
    processor.add(0, NewRequestData(0, token_ids(prompt), token_ids(), [], 0, 0, how))
    for token in output:
        for rules in processor.rules_of(np.array([0])):
            assert rules is not None
            rules.note(token)
    noted = processor.apply(logits.clone(), np.array([0]))
    assert torch.equal(noted, apply(logits, [(how, prompt, output)]))


def test_a_row_that_left_leaves_no_rules_to_the_next() -> None:
    processor = LogitsProcessor(VOCAB)
    processor.add(3, NewRequestData(0, token_ids([1]), token_ids(), [], 0, 0, RULES["bias"]))
    processor.forget(3)
    logits = torch.zeros(1, VOCAB)
    assert processor.apply(logits, np.array([3])) is logits


@pytest.mark.parametrize(
    "how",
    [
        params(**bias({VOCAB: 1.0})),
        params(allowed_token_ids=token_ids([VOCAB])),
        params(bad_words=words([1, VOCAB])),
        params(bad_words=words([])),
        params(min_tokens=1, stop_token_ids=[-1]),
        params(bias_token_ids=token_ids([1])),
    ],
)
def test_a_token_that_is_none_is_refused(how: SamplingParams) -> None:
    new = NewRequestData(1, token_ids([1]), token_ids(), [], 0, 0, how)
    with pytest.raises(ValueError, match=r"token|columns"):
        LogitsProcessor(VOCAB).add(0, new)


def test_no_schedule_changes_an_answer_with_rules(
    make_runner: Callable[..., ModelRunner], tiny_folder: Callable[[str], Path]
) -> None:
    """With joins, chunks and preemptions: each token counts for the next one."""
    samplings = list(RULES.values())
    prompts = random_prompts(len(samplings), seed=4)
    model = tiny_models.reference(tiny_folder("llama"))
    expected = [
        plain_answer(model, prompt, how, 20) for prompt, how in zip(prompts, samplings, strict=True)
    ]
    for seed in (1, 2):
        found = play(make_runner(), prompts, samplings, num_tokens=20, seed=seed)
        assert found == expected


def test_what_allows_no_token_is_the_fault_of_that_request_alone(
    make_runner: Callable[..., ModelRunner],
) -> None:
    runner = make_runner()
    driver = StepDriver(64, 16)
    impossible = params(allowed_token_ids=token_ids([5]), bad_words=words([5]))
    foreign = params(**bias({VOCAB + 3: 1.0}))
    for req, how in enumerate((params(), impossible, foreign), start=1):
        driver.add(req, [1, 2, 3], how)
    result = execute(runner, driver.step(start={1: 3, 2: 3, 3: 3}))
    assert {(error.req, error.code) for error in result.errors} == {(2, "invalid"), (3, "invalid")}


def test_any_number_of_tokens_is_counted() -> None:
    """More than there was room for at first, whether they come with the prompt or one by one."""
    prompt, output = list(range(50)), [*range(40, 700), *range(300)]
    counts = TokenCounts(prompt, [])
    for token in output:
        counts.add(token)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {token: output.count(token) for token in range(700)}
    at_once = TokenCounts(prompt, output)
    assert at_once.ids.tolist() == counts.ids.tolist()
    assert at_once.counts.tolist() == counts.counts.tolist()
