"""A step that does not fit into memory is run in smaller ones; what fits in none fails alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_worker.input_batch import InputBatch
from gpu_worker.model_runner import ModelRunner, is_out_of_memory
from tests.fakes import tiny_models
from tests.fakes.step_driver import StepDriver

MakeRunner = Callable[..., ModelRunner]

PROMPTS = [[7] * 20, [1, 2, 3], [9, 8] * 12, [5]]
GUILTY = 11


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[InputBatch], bool]], list[int]]:
    """Let the model run out of memory where a test says so; the sizes of the steps that ran."""

    def starve(is_too_much: Callable[[InputBatch], bool]) -> list[int]:
        sizes: list[int] = []
        forward = ModelRunner._forward

        def limited(self: ModelRunner, batch: InputBatch) -> Tensor:
            if is_too_much(batch):
                raise torch.OutOfMemoryError("CUDA out of memory")
            sizes.append(len(batch.token_ids))
            return forward(self, batch)

        monkeypatch.setattr(ModelRunner, "_forward", limited)
        return sizes

    return starve


@torch.inference_mode()
def answers(runner: ModelRunner, num_tokens: int) -> tuple[list[list[int]], list[int]]:
    """Outputs, and which requests failed."""
    driver = StepDriver(runner.capacity.num_blocks, runner.capacity.block_size)
    for req, prompt in enumerate(PROMPTS, start=1):
        driver.add(req, prompt)
    failed: list[int] = []
    start = {req: len(prompt) for req, prompt in enumerate(PROMPTS, start=1)}
    for number in range(num_tokens):
        result = runner.execute(driver.step(start if number == 0 else {}))
        assert result is not None
        failed += [error.req for error in result.errors]
        driver.take(result)
    return [driver.requests[req].output for req in start], failed


@pytest.mark.parametrize("most", [1, 7, 20])
def test_smaller_steps_give_the_same_answers(
    most: int,
    make_runner: MakeRunner,
    tiny_folder: Callable[[str], Path],
    starved: Callable[[Callable[[InputBatch], bool]], list[int]],
) -> None:
    runner = make_runner(num_blocks=20)
    sizes = starved(lambda batch: len(batch.token_ids) > most)
    found, failed = answers(runner, 6)
    model = tiny_models.reference(tiny_folder("llama"))
    assert found == [tiny_models.greedy(model, prompt, 6) for prompt in PROMPTS]
    assert failed == []
    assert max(sizes) <= most


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_smaller_steps_of_a_mixture_give_the_same_answers(
    most: int,
    make_runner: MakeRunner,
    tiny_folder: Callable[[str], Path],
    starved: Callable[[Callable[[InputBatch], bool]], list[int]],
) -> None:
    """Decodes, requests that catch up and reach the end or do not, and new ones, in any order."""
    runner = make_runner(num_blocks=20)
    starved(lambda batch: len(batch.token_ids) > most)
    driver = StepDriver(runner.capacity.num_blocks, runner.capacity.block_size)
    for req, prompt in enumerate([*PROMPTS, [3, 4, 5]], start=1):
        driver.add(req, prompt)
    for wanted in (
        {"start": {4: 1, 1: 5}},
        {"chunks": {1: 3}, "start": {5: 2, 2: 3}},
        {"chunks": {5: 1, 1: 4}, "start": {3: 7}},
        {"chunks": {3: 2, 1: 8}},
        {"chunks": {3: 15}},
        {},
    ):
        with torch.inference_mode():
            result = runner.execute(driver.step(**wanted))
        assert result is not None
        driver.take(result)
    model = tiny_models.reference(tiny_folder("llama"))
    for request in driver.requests.values():
        assert request.output == tiny_models.greedy(model, request.prompt, len(request.output))
        assert request.output


def test_a_request_that_fits_into_no_step_fails_alone(
    make_runner: MakeRunner,
    tiny_folder: Callable[[str], Path],
    starved: Callable[[Callable[[InputBatch], bool]], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guilty = [1, GUILTY, *range(20, 40)]  # its prompt ends well behind what does not fit
    monkeypatch.setattr("tests.unit.gpu_worker.test_out_of_memory.PROMPTS", [*PROMPTS, guilty])
    runner = make_runner(num_blocks=20)
    starved(lambda batch: GUILTY in batch.token_ids.tolist())
    found, failed = answers(runner, 1)
    model = tiny_models.reference(tiny_folder("llama"))
    assert found[:-1] == [tiny_models.greedy(model, prompt, 1) for prompt in PROMPTS[:-1]]
    assert failed == [len(PROMPTS)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried …"), True),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_only_a_lack_of_memory_is_taken_for_one(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
