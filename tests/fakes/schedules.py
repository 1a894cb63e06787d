"""Random schedules for a real worker: joins, chunks and preemptions."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from gpu_worker.model_runner import ModelRunner
from tests.fakes import tiny_models
from tests.fakes.step_driver import StepDriver
from wire.messages import ModelRunnerOutput, SamplingParams, SchedulerOutput


def execute(runner: ModelRunner, step: SchedulerOutput) -> ModelRunnerOutput:
    with torch.inference_mode():
        result = runner.execute(step)
    assert result is not None
    return result


def random_prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 15, 16, 17, 31, 32, 33, 50]) for _ in range(count)]
    return [[draw.randrange(tiny_models.VOCAB) for _ in range(length)] for length in lengths]


def play(
    runner: ModelRunner,
    prompts: list[list[int]],
    samplings: list[SamplingParams],
    num_tokens: int,
    seed: int,
    *,
    hear: Callable[[ModelRunnerOutput], None] = lambda _: None,
) -> list[list[int]]:
    """Generate `num_tokens` for each prompt under a random schedule with joins and preemptions.

    `hear` is given every result. Requests are numbered from 1 on.
    """
    draw = random.Random(seed)
    num_blocks = runner.capacity.num_blocks
    driver = StepDriver(num_blocks, runner.capacity.block_size)
    for req, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True), start=1):
        driver.add(req, prompt, sampling)
    done: set[int] = set()
    num_preempted = 0
    while len(done) < len(prompts):
        ended = [r for r in driver.decode_batch if len(driver.requests[r].output) >= num_tokens]
        here = [req for req in driver.requests if driver.is_here(req) and req not in ended]
        victims = [req for req in here if draw.random() < 0.03]
        num_preempted += len(victims)
        waiting = [r for r in driver.requests if not driver.is_here(r) and r not in done]
        start, chunks = {}, {}
        room = driver.num_free_blocks - len(here) - 4
        for req in driver.catching_up:
            if req not in victims and draw.random() < 0.8:
                request = driver.requests[req]
                chunks[req] = draw.randint(1, request.num_known - request.num_computed)
        for req in waiting:
            needed = -(-driver.requests[req].num_known // 16) + 2
            if draw.random() < 0.5 and room >= needed:
                room -= needed
                start[req] = draw.randint(1, driver.requests[req].num_known)
        step = driver.step(start, chunks, tuple(ended), tuple(victims))
        done.update(ended)
        result = execute(runner, step)
        driver.take(result)
        hear(result)
    assert num_preempted > 0
    assert driver.num_free_blocks == num_blocks
    return [driver.requests[req].output[:num_tokens] for req in sorted(driver.requests)]
