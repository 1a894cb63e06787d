"""What was copied to the CPU pool and back goes on as if it had never been away."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_worker.attention.base import PagedBackend
from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.torch import TorchAttention
from gpu_worker.block_table import ProtocolError
from gpu_worker.model_loader import LoadedModel
from gpu_worker.model_runner import ModelRunner
from gpu_worker.request_states import Capacity
from tests.fakes import tiny_models
from tests.fakes.step_driver import StepDriver
from wire.messages import BlockCopies, SchedulerOutput

NUM_BLOCKS, NUM_CPU_BLOCKS = 7, 8  # no more on the device than two of the requests need


@pytest.fixture(params=["torch", "cpu"])
def runner(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], LoadedModel], kernel_folder: Path
) -> ModelRunner:
    model = tiny_model("llama")
    backend: PagedBackend = (
        CpuAttention(16, torch.float32, kernel_folder)
        if request.param == "cpu"
        else TorchAttention(16, torch.float32, model.device)
    )
    capacity = Capacity(
        NUM_BLOCKS, 16, tiny_models.MAX_LEN, 8, 256, model.vocab_size, NUM_CPU_BLOCKS
    )
    return ModelRunner(model, backend, capacity)


def test_swapped_answers_equal_undisturbed_ones(
    runner: ModelRunner, tiny_folder: Callable[[str], Path]
) -> None:
    """Others write the blocks in the very step that copies them out, and before they return."""
    draw = random.Random(4)
    prompts = [[draw.randrange(tiny_models.VOCAB) for _ in range(n)] for n in (37, 45, 40)]
    driver = StepDriver(NUM_BLOCKS, 16, num_cpu_blocks=NUM_CPU_BLOCKS)
    for req, prompt in enumerate(prompts, start=1):
        driver.add(req, prompt)
    copied_us = 0

    def run(step: SchedulerOutput) -> None:
        nonlocal copied_us
        with torch.inference_mode():
            result = runner.execute(step)
        assert result is not None
        assert (result.copy_us > 0) == bool(step.copies)
        assert result.copy_us <= result.device_us
        copied_us += result.copy_us
        driver.take(result)

    run(driver.step(start={1: 37, 2: 45}))
    for _ in range(3):
        run(driver.step())
    run(driver.step(swap_out=(1,), start={3: 40}))
    for _ in range(2):
        run(driver.step())
    run(driver.step(swap_out=(2,), finish=(3,), start={1: 1}))
    for _ in range(4):
        run(driver.step())
    run(driver.step(finish=(1,), start={2: 1}))
    for _ in range(4):
        run(driver.step())
    model = tiny_models.reference(tiny_folder("llama"))
    for req, prompt in enumerate(prompts, start=1):
        output = driver.requests[req].output
        assert output == tiny_models.greedy(model, prompt, len(output))
    assert copied_us > 0


@pytest.mark.parametrize(
    "copies",
    [
        BlockCopies("out", [0], [NUM_CPU_BLOCKS]),
        BlockCopies("out", [NUM_BLOCKS], [0]),
        BlockCopies("in", [-1], [0]),
        BlockCopies("in", [0, 1], [0]),
    ],
)
def test_blocks_that_are_in_no_pool_are_refused(copies: BlockCopies, runner: ModelRunner) -> None:
    with pytest.raises(ProtocolError, match="cop"):
        runner.execute(SchedulerOutput(1, 1, copies=[copies]))
