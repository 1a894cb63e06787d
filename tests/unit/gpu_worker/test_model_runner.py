"""What a worker generates is the model's own answer, whatever the schedule does to a request."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_worker import sampler
from gpu_worker.block_table import IntArray, ProtocolError
from gpu_worker.model_runner import ModelRunner
from gpu_worker.sampler import SamplingMetadata, make_metadata
from gpu_worker.sampling_columns import SamplingColumns
from tests.fakes import tiny_models
from tests.fakes.schedules import execute, play, random_prompts
from tests.fakes.step_driver import GREEDY, StepDriver
from wire.messages import (
    BlockCopies,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SamplingParams,
    SchedulerOutput,
    crc_of,
    token_ids,
)

MakeRunner = Callable[..., ModelRunner]


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule_gives_the_models_own_greedy_answer(
    seed: int, make_runner: MakeRunner, tiny_folder: Callable[[str], Path]
) -> None:
    prompts = random_prompts(10, seed)
    found = play(make_runner(num_blocks=60), prompts, [GREEDY] * 10, num_tokens=24, seed=seed)
    model = tiny_models.reference(tiny_folder("llama"))
    assert found == [tiny_models.greedy(model, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_every_boundary_of_blocks_and_chunks_gives_the_same_answer(
    length: int, make_runner: MakeRunner, tiny_folder: Callable[[str], Path]
) -> None:
    """One row, and as many blocks as the request needs: nothing to spare."""
    draw = random.Random(length)
    prompt = [draw.randrange(tiny_models.VOCAB) for _ in range(length)]
    expected = tiny_models.greedy(tiny_models.reference(tiny_folder("llama")), prompt, 18)
    num_blocks = -(-(length + 17) // 16)
    runner = make_runner(num_blocks=num_blocks, max_num_seqs=1)
    for chunk in {1, 15, 16, 17, length}:
        runner.reset()
        driver = StepDriver(num_blocks, 16)
        driver.add(1, prompt)
        request = driver.requests[1]
        driver.take(execute(runner, driver.step(start={1: min(chunk, length)})))
        while request.num_computed < length:
            step = driver.step(chunks={1: min(chunk, length - request.num_computed)})
            driver.take(execute(runner, step))
        while len(request.output) < 18:
            driver.take(execute(runner, driver.step()))
        assert request.output == expected


def test_no_schedule_changes_what_is_drawn(make_runner: MakeRunner) -> None:
    prompts = random_prompts(8, seed=9)
    samplings = [
        SamplingParams(max_tokens=99, temperature=t, top_k=k, top_p=p, min_p=m, seed=seed)
        for seed, (t, k, p, m) in enumerate(
            [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1)] * 2
        )
    ]
    one = play(make_runner(), prompts, samplings, num_tokens=20, seed=1)
    other = play(make_runner(), prompts, samplings, num_tokens=20, seed=2)
    assert one == other
    reseeded = [replace(sampling, seed=sampling.seed + 100) for sampling in samplings]
    assert play(make_runner(), prompts, reseeded, num_tokens=20, seed=1) != one


def test_a_prefix_of_another_request_can_be_used_without_being_computed(
    make_runner: MakeRunner, tiny_folder: Callable[[str], Path]
) -> None:
    runner = make_runner()
    draw = random.Random(3)
    prompt = [draw.randrange(tiny_models.VOCAB) for _ in range(40)]
    driver = StepDriver(64, 16)
    driver.add(1, prompt)
    driver.take(execute(runner, driver.step(start={1: 40})))
    shared = driver.requests[1].blocks[:2]
    new = NewRequestData(2, token_ids(prompt), token_ids(), [*shared, 0], 32, 8, GREEDY)
    step = replace(driver.step(), new_reqs=[new])
    tokens = execute(runner, step).sampled_token_ids
    model = tiny_models.reference(tiny_folder("llama"))
    assert [tokens[1]] == tiny_models.greedy(model, prompt, 1)


def test_draws_are_numbered_by_output_token(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a token was generated here or came with the request makes no difference."""
    seen: list[list[int]] = []

    def watched(
        columns: SamplingColumns, rows: IntArray, output_index: IntArray, device: torch.device
    ) -> SamplingMetadata | None:
        seen.append(output_index.tolist())
        return make_metadata(columns, rows, output_index, device)

    monkeypatch.setattr(sampler, "make_metadata", watched)
    runner = make_runner()
    fresh = new_request(1)
    resumed = new_request(
        2, output_token_ids=token_ids([1, 2]), num_scheduled_tokens=6, block_ids=[4]
    )
    execute(runner, SchedulerOutput(1, 1, new_reqs=[fresh, resumed]))
    execute(runner, SchedulerOutput(1, 2, num_decodes=2))
    assert seen == [[0, 2], [1, 3]]


# ---------------------------------------------------------------- errors of one request


def new_request(req: int = 1, **changes: object) -> NewRequestData:
    fields = {
        "req": req,
        "prompt_token_ids": token_ids([5, 6, 7, 8]),
        "output_token_ids": token_ids(),
        "block_ids": [3],
        "num_computed_tokens": 0,
        "num_scheduled_tokens": 4,
        "sampling": GREEDY,
    }
    return NewRequestData(**{**fields, **changes})  # type: ignore[arg-type]  # by name


def test_a_token_beyond_the_vocabulary_is_an_error_of_its_request_alone(
    make_runner: MakeRunner,
) -> None:
    alone = execute(make_runner(), SchedulerOutput(1, 1, new_reqs=[new_request(2)]))
    foreign = token_ids([5, tiny_models.VOCAB, 2**32 - 1])
    bad = new_request(1, prompt_token_ids=foreign, num_scheduled_tokens=3, block_ids=[1])
    runner = make_runner()
    result = execute(runner, SchedulerOutput(1, 1, new_reqs=[bad, new_request(2)]))
    assert [error.req for error in result.errors] == [1]
    assert str(tiny_models.VOCAB) in result.errors[0].message
    assert result.sampled_token_ids[1] == alone.sampled_token_ids[0]
    after = execute(runner, SchedulerOutput(1, 2, num_decodes=2))
    assert (len(after.sampled_token_ids), after.errors) == (2, result.errors)


@pytest.mark.parametrize("logprobs", [None, 3])
def test_logits_that_are_not_finite_are_an_error_of_their_request_alone(
    make_runner: MakeRunner, logprobs: int | None
) -> None:
    how = SamplingParams(max_tokens=20, temperature=0.0, logprobs=logprobs)
    runner = make_runner()
    sick = tiny_models.VOCAB - 1
    runner.model.module.model.embed_tokens.weight.data[sick] = torch.inf
    requests = [
        new_request(1, prompt_token_ids=token_ids([sick] * 4), sampling=how),
        new_request(2, block_ids=[4], sampling=how),
    ]
    result = execute(runner, SchedulerOutput(1, 1, new_reqs=requests))
    assert [error.req for error in result.errors] == [1]
    assert len(result.sampled_token_ids) == 2
    assert [one.req for one in result.logprobs] == ([1, 2] if logprobs else [])
    again = execute(runner, SchedulerOutput(1, 2, num_decodes=2))
    assert [error.req for error in again.errors] == [1]


# ---------------------------------------------------------------- epochs and fences


def test_a_step_without_work_is_answered_with_nothing(make_runner: MakeRunner) -> None:
    assert execute(make_runner(), SchedulerOutput(1, 1)).sampled_token_ids == token_ids()


def test_a_higher_epoch_forgets_every_request(make_runner: MakeRunner) -> None:
    runner = make_runner()
    execute(runner, SchedulerOutput(1, 1, new_reqs=[new_request()]))
    result = execute(runner, SchedulerOutput(2, 1, new_reqs=[new_request()]))
    assert (runner.epoch, len(result.sampled_token_ids)) == (2, 1)


def test_a_lower_epoch_is_ignored(make_runner: MakeRunner) -> None:
    runner = make_runner()
    execute(runner, SchedulerOutput(7, 1, new_reqs=[new_request()]))
    assert runner.execute(SchedulerOutput(6, 2, finished_reqs=[1])) is None
    assert len(execute(runner, SchedulerOutput(7, 2, num_decodes=1)).sampled_token_ids) == 1


def test_a_fence_forgets_every_request_within_an_epoch(make_runner: MakeRunner) -> None:
    runner = make_runner()
    execute(runner, SchedulerOutput(1, 1, new_reqs=[new_request()]))
    result = execute(runner, SchedulerOutput(1, 2, is_fence=True))
    assert result == ModelRunnerOutput(1, 2, held=result.held)
    execute(runner, SchedulerOutput(1, 3, new_reqs=[new_request()]))


def test_a_fence_is_answered_with_what_is_held(make_runner: MakeRunner) -> None:
    runner = make_runner()
    first = execute(runner, SchedulerOutput(1, 1, new_reqs=[new_request(), new_request(2)]))
    second = execute(runner, SchedulerOutput(1, 2, num_decodes=2, finished_reqs=[]))
    execute(runner, SchedulerOutput(1, 3, num_decodes=1, finished_reqs=[2]))
    (held,) = execute(runner, SchedulerOutput(2, 0, is_fence=True)).held
    new = new_request()
    assert held.req == new.req
    assert held.prompt_crc == crc_of(new.prompt_token_ids)
    assert held.block_ids.tolist() == new.block_ids
    assert held.num_computed_tokens == len(new.prompt_token_ids) + 2
    sampled = [first.sampled_token_ids[0], second.sampled_token_ids[0]]
    assert held.output_token_ids[:2].tolist() == sampled
    again = execute(runner, SchedulerOutput(3, 0, is_fence=True)).held
    assert again == [held], "nothing has written since"
    execute(runner, SchedulerOutput(3, 1, new_reqs=[new_request(3)]))
    execute(runner, SchedulerOutput(3, 2, finished_reqs=[3], num_decodes=0))
    assert execute(runner, SchedulerOutput(4, 0, is_fence=True)).held == []


# ---------------------------------------------------------------- steps that do not fit


def listed(req: int, count: int, blocks: list[int]) -> CachedRequestData:
    return CachedRequestData([req], [count], [blocks])


IMPOSSIBLE = {
    "decodes that are not": SchedulerOutput(1, 3),
    "end of a stranger": SchedulerOutput(1, 3, num_decodes=1, finished_reqs=[9]),
    "preemption of a stranger": SchedulerOutput(1, 3, num_decodes=1, preempted_reqs=[9]),
    "a stranger goes on": SchedulerOutput(1, 3, cached_reqs=listed(9, 1, []), num_decodes=1),
    "columns differ": SchedulerOutput(
        1, 3, cached_reqs=CachedRequestData([2], [1], []), num_decodes=1
    ),
    "two tokens of a decode": SchedulerOutput(1, 3, cached_reqs=listed(1, 2, []), num_decodes=1),
    "no token": SchedulerOutput(1, 3, cached_reqs=listed(2, 0, []), num_decodes=1),
    "more tokens than known": SchedulerOutput(1, 3, cached_reqs=listed(2, 3, []), num_decodes=1),
    "a block that is not": SchedulerOutput(1, 3, cached_reqs=listed(2, 1, [64]), num_decodes=1),
    "a negative block": SchedulerOutput(1, 3, cached_reqs=listed(2, 1, [-1]), num_decodes=1),
    "more blocks than a row": SchedulerOutput(
        1, 3, cached_reqs=listed(2, 1, [1] * 40), num_decodes=1
    ),
    "copies without a pool": SchedulerOutput(
        1, 3, num_decodes=1, copies=[BlockCopies("out", [3], [0])]
    ),
    "twice in a step": SchedulerOutput(
        1, 3, cached_reqs=CachedRequestData([2, 2], [1, 1], [[], []]), num_decodes=1
    ),
    "a decode twice in a step": SchedulerOutput(
        1, 3, cached_reqs=CachedRequestData([1, 1], [1, 1], [[5], [5]]), num_decodes=1
    ),
    "new, but here": SchedulerOutput(1, 3, num_decodes=1, new_reqs=[new_request(1)]),
    "new with too few blocks": SchedulerOutput(
        1, 3, num_decodes=1, new_reqs=[new_request(3, block_ids=[])]
    ),
    "new and computed to the end": SchedulerOutput(
        1, 3, num_decodes=1, new_reqs=[new_request(3, num_computed_tokens=4)]
    ),
    "new and computed before its start": SchedulerOutput(
        1, 3, num_decodes=1, new_reqs=[new_request(3, num_computed_tokens=-1)]
    ),
    "more requests than rows": SchedulerOutput(
        1, 3, num_decodes=1, new_reqs=[new_request(req) for req in range(10, 30)]
    ),
    "more tokens than the budget": SchedulerOutput(
        1,
        3,
        num_decodes=1,
        new_reqs=[
            new_request(
                3,
                prompt_token_ids=token_ids([1] * 300),
                block_ids=list(range(19)),
                num_scheduled_tokens=300,
            )
        ],
    ),
}


@pytest.mark.parametrize("step", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_step_that_does_not_fit_is_refused(
    step: SchedulerOutput, make_runner: MakeRunner
) -> None:
    """Request 1 decodes, and request 2 has two of its four tokens."""
    runner = make_runner()
    requests = [new_request(1), new_request(2, block_ids=[4], num_scheduled_tokens=2)]
    execute(runner, SchedulerOutput(1, 1, new_reqs=requests))
    with pytest.raises(ProtocolError):
        runner.execute(step)
    runner.reset()
    execute(runner, SchedulerOutput(1, 4, new_reqs=requests))


def test_a_decode_without_a_block_for_its_token_is_refused(make_runner: MakeRunner) -> None:
    runner = make_runner()
    full = new_request(prompt_token_ids=token_ids([1] * 16), num_scheduled_tokens=16)
    execute(runner, SchedulerOutput(1, 1, new_reqs=[full]))
    with pytest.raises(ProtocolError, match="blocks hold"):
        runner.execute(SchedulerOutput(1, 2, num_decodes=1))


def test_warming_up_leaves_no_trace(make_runner: MakeRunner) -> None:
    for num_blocks in (1, 2, 64):
        runner = make_runner(num_blocks=num_blocks)
        with torch.inference_mode():
            runner.warm_up()
        assert runner.epoch == 0
        execute(runner, SchedulerOutput(1, 1, new_reqs=[new_request(block_ids=[0])]))
