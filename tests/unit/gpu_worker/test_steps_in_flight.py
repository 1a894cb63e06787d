"""A step is launched before the tokens of the last one are on the host, and nothing differs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from gpu_worker.executor import Executor
from gpu_worker.model_runner import Launched, ModelRunner
from tests.fakes import tiny_models
from tests.fakes.recorder import SlowDevice
from tests.fakes.step_driver import GREEDY, StepDriver
from wire.config import load
from wire.messages import ModelRunnerOutput, RequestError, SamplingParams, SchedulerOutput

NUM_BLOCKS, BLOCK = 64, 16
PROMPTS = {1: [5, 6, 7], 2: [9] * 17, 3: [11, 12]}
PENALISED = replace(GREEDY, frequency_penalty=1.5, presence_penalty=1.0)

MakeRunner = Callable[..., ModelRunner]


def driver(prompts: dict[int, list[int]] = PROMPTS, how: SamplingParams = GREEDY) -> StepDriver:
    made = StepDriver(NUM_BLOCKS, BLOCK)
    for req, prompt in prompts.items():
        made.add(req, prompt, how)
    return made


def everything(prompts: dict[int, list[int]] = PROMPTS) -> dict[int, int]:
    return {req: len(prompt) for req, prompt in prompts.items()}


def on_slow_device(runner: ModelRunner) -> SlowDevice:
    device = SlowDevice()
    runner._copy_out = device
    return device


def launch(runner: ModelRunner, step: SchedulerOutput) -> Launched:
    with torch.inference_mode():
        launched = runner.launch(step)
    assert isinstance(launched, Launched)
    return launched


def in_pairs(runner: ModelRunner, driven: StepDriver, num_steps: int) -> dict[int, list[int]]:
    """Always one step ahead of the results, as a worker of a GPU is."""
    device = on_slow_device(runner)
    waiting = [launch(runner, driven.step(everything()))]
    for _ in range(num_steps - 1):
        waiting.append(launch(runner, driven.step()))
        device.complete()
        driven.take(runner.finish(waiting.pop(0)))
    device.complete()
    driven.take(runner.finish(waiting.pop(0)))
    return {req: request.output for req, request in driven.requests.items()}


def one_by_one(runner: ModelRunner, driven: StepDriver, num_steps: int) -> dict[int, list[int]]:
    for number in range(num_steps):
        step = driven.step(everything() if number == 0 else {})
        driven.take(runner.finish(launch(runner, step)))
    return {req: request.output for req, request in driven.requests.items()}


@pytest.mark.parametrize(
    "how", [GREEDY, SamplingParams(max_tokens=99, temperature=1.2, top_k=20, seed=3)]
)
def test_tokens_are_those_of_a_worker_that_waits(
    how: SamplingParams, make_runner: MakeRunner
) -> None:
    ahead = in_pairs(make_runner(), driver(how=how), 12)
    assert ahead == one_by_one(make_runner(), driver(how=how), 12)


def test_rules_see_every_token_before(make_runner: MakeRunner) -> None:
    """A step whose requests have rules waits for the step before it."""
    runner = make_runner()
    device = on_slow_device(runner)
    driven = driver(how=PENALISED)
    first = launch(runner, driven.step(everything()))
    device.complete()  # or the next line would wait for ever
    second = launch(runner, driven.step())
    assert first.output is not None
    assert second.output is None
    device.hurry()
    driven.take(runner.finish(first))
    driven.take(runner.finish(second))
    expected = one_by_one(make_runner(), driver(how=PENALISED), 2)
    assert {req: request.output for req, request in driven.requests.items()} == expected


def test_a_token_that_comes_late_is_not_the_next_requests(make_runner: MakeRunner) -> None:
    """The row has another owner by then: what it holds must be its own."""
    runner = make_runner(max_num_seqs=3)
    device = on_slow_device(runner)
    driven = driver()
    first = launch(runner, driven.step(everything()))
    late = launch(runner, driven.step())
    driven.add(4, [30] * 4)
    after = launch(runner, driven.step({4: 4}, finish=(1,)))
    device.hurry()
    for launched in (first, late, after):
        driven.take(runner.finish(launched))
    assert len(driven.requests[1].output) == 2
    held = runner.execute(SchedulerOutput(2, 0, is_fence=True))
    assert held is not None
    outputs = {one.req: one.output_token_ids.tolist() for one in held.held}
    assert outputs == {req: driven.requests[req].output for req in (2, 3, 4)}


def test_a_fence_waits_for_what_is_in_flight(make_runner: MakeRunner) -> None:
    runner = make_runner()
    device = on_slow_device(runner)
    driven = driver()
    launched = [launch(runner, driven.step(everything())), launch(runner, driven.step())]
    device.hurry()
    answer = runner.execute(SchedulerOutput(2, 0, is_fence=True))
    assert answer is not None
    assert [len(one.output_token_ids) for one in answer.held] == [2, 2, 2]
    assert all(one.output is not None for one in launched)


def test_logits_that_turn_out_to_be_no_numbers_are_told_in_every_step(
    make_runner: MakeRunner,
) -> None:
    runner = make_runner()
    device = on_slow_device(runner)
    sick = tiny_models.VOCAB - 1
    runner.model.module.model.embed_tokens.weight.data[sick] = torch.inf
    prompts = {1: [sick, 3], 2: [5, 6]}
    driven = driver(prompts)
    steps = [launch(runner, driven.step(everything(prompts))), launch(runner, driven.step())]
    device.hurry()
    expected = [RequestError(1, "its logits are not finite")]
    for launched in steps:
        output = runner.finish(launched)
        assert output.errors == expected
        driven.take(output)
    assert len(driven.requests[2].output) == 2


def test_a_request_that_left_and_came_back_is_not_blamed_for_its_former_self(
    make_runner: MakeRunner,
) -> None:
    runner = make_runner()
    device = on_slow_device(runner)
    weight = runner.model.module.model.embed_tokens.weight.data
    healthy = weight[5].clone()
    weight[5] = torch.inf
    driven = driver({1: [5, 3]})
    first = launch(runner, driven.step({1: 2}))
    weight[5] = healthy
    left = launch(runner, driven.step(preempt=(1,)))
    driven.requests[1].num_computed = 0
    back = launch(runner, driver({1: [5, 3]}).step({1: 2}))
    device.hurry()
    assert [error.req for error in runner.finish(first).errors] == [1]
    assert runner.finish(left).errors == []
    assert runner.finish(back).errors == []


# ---------------------------------------------------------------- the threads around it


async def test_the_device_thread_is_not_held_up_by_a_step_that_computes(
    tiny_folder: Callable[..., object],
) -> None:
    executor = Executor(load(device="cpu", dtype="float32", num_gpu_blocks=NUM_BLOCKS))
    await executor.load(lambda: tiny_folder("llama"))  # type: ignore[arg-type, return-value]
    device = on_slow_device(executor.runner)
    driven = driver()
    answers = [executor.submit(driven.step(everything())), executor.submit(driven.step())]
    async with asyncio.timeout(20):
        while len(device.on_their_way) < 2:
            await asyncio.sleep(0.01)
    assert not any(answer.done() for answer in answers)
    assert executor.running is not None
    assert executor.running.step_id == 1
    device.complete()
    first = await asyncio.wait_for(answers[0], 20)
    assert first is not None
    driven.take(first)
    assert not answers[1].done()
    assert executor.running.step_id == 2
    bad = executor.submit(SchedulerOutput(1, 3, num_decodes=9))
    device.hurry()
    results = await asyncio.gather(answers[1], bad)
    assert isinstance(results[0], ModelRunnerOutput)
    assert results[0].failed is None, "a step that was launched before one that fails is answered"
    assert results[1] is not None
    assert "num_decodes is 9" in str(results[1].failed)
    assert executor.running is None
    executor.close()


async def test_what_goes_wrong_on_the_device_is_the_answer_of_its_step(
    tiny_folder: Callable[..., object],
) -> None:
    executor = Executor(load(device="cpu", dtype="float32", num_gpu_blocks=NUM_BLOCKS))
    await executor.load(lambda: tiny_folder("llama"))  # type: ignore[arg-type, return-value]

    class Broken:
        def is_here(self) -> bool:
            return False

        def numbers(self) -> list[int]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    executor.runner._copy_out = lambda _source: Broken()
    result = await asyncio.wait_for(executor.submit(driver().step(everything())), 20)
    assert result is not None
    assert "illegal memory access" in str(result.failed)
    after = await executor.submit(SchedulerOutput(1, 2))
    assert after is not None
    assert "before it" in str(after.failed)
    executor.close()
