"""Room that is kept, prompts that are cut, siblings that share, and workers that come and go."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.request import RequestStatus
from tests.fakes.world import World
from wire.messages import SYSTEM_PRIORITY

BLOCK = 4


def new_world(num_blocks: int, budget: int = 64, workers: int = 1, **config: Any) -> World:
    return World(
        SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=16, **config),
        WorkerCapacity(num_blocks, BLOCK, 10_000),
        workers=workers,
    )


def running(world: World, worker: str = "w0") -> set[int]:
    return {request.num for request in world.scheduler.lanes[worker].running}


# ---------------------------------------------------------------- kept


@pytest.mark.parametrize(
    ("config", "system_too"), [({"watermark": 0.5}, True), ({"reserved_blocks": 10}, False)]
)
def test_kept_blocks_are_not_admitted_to_unless_nothing_runs(
    config: dict[str, Any], system_too: bool
) -> None:
    world = new_world(20, long_prefill_token_threshold=64, **config)
    large, small = world.add([1] * 44, max_tokens=3), world.add([2] * 8, max_tokens=3)
    world.step("w0")
    assert running(world) == {large.num}, "it takes more than half, and nobody else may follow"
    system = world.add([3] * 8, max_tokens=3, priority=SYSTEM_PRIORITY)
    world.step("w0")
    assert (system.num in running(world)) != system_too
    world.finish_everything()
    assert small.tokens


@pytest.mark.parametrize("reserves", [True, False])
def test_a_prompt_is_admitted_only_when_all_of_it_fits_if_so_set(reserves: bool) -> None:
    world = new_world(100, reserve_full_prompt=reserves)
    world.add([1] * 300, max_tokens=3)
    world.step("w0")
    second = world.add([2] * 350, max_tokens=3)
    world.step("w0")
    assert (second.num in running(world)) != reserves
    world.finish_everything()


# ---------------------------------------------------------------- long and short


@pytest.mark.parametrize("threshold", [0, 8])
def test_short_prompts_start_within_a_few_steps_of_a_long_one_and_it_ends_in_time(
    threshold: int,
) -> None:
    budget, num_short = 128, 10
    world = new_world(4000, budget, long_prefill_token_threshold=threshold)
    for i in range(5):
        world.add([i], max_tokens=300)
    world.step("w0"), world.result("w0")
    long = world.add([6] * 64 * budget, max_tokens=1)
    short = [world.add([7, i] * 10, max_tokens=1) for i in range(num_short)]
    rounds = 0
    while not all(s.tokens for s in short):
        world.step("w0"), world.result("w0")
        rounds += 1
    # 200 tokens of short prompts, and the long one gets at most half of what decoding leaves
    assert rounds <= 200 / ((budget - 5) / 2) + 2
    while not long.tokens:
        world.step("w0"), world.result("w0")
        rounds += 1
    assert rounds <= (64 * budget + 200) / (budget - 5) + 10
    world.finish_everything()


# ---------------------------------------------------------------- siblings


def test_siblings_share_the_prompts_full_blocks_and_start_once_it_is_scheduled() -> None:
    world = new_world(200, budget=16)
    prompt = [1, 2, 3, 4] * 10
    siblings = [world.add(prompt, max_tokens=6, seed=i) for i in range(4)]
    world.step("w0")
    assert running(world) == {siblings[0].num}
    world.step("w0"), world.result("w0")
    while len(running(world)) < 4:
        world.step("w0"), world.result("w0")
    tables = [world.scheduler.requests[s.num].block_ids[:9] for s in siblings]
    assert all(table == tables[0] for table in tables), "nine full blocks of the prompt"
    assert world.scheduler.totals.prefix_cache_hits == 3 * 9 * BLOCK
    world.finish_everything()
    assert len({tuple(s.tokens) for s in siblings}) > 1


def test_siblings_of_an_aborted_first_do_not_wait_for_it() -> None:
    world = new_world(200, budget=16)
    first, *rest = (world.add([1, 2, 3, 4] * 10, max_tokens=3, seed=i) for i in range(3))
    world.step("w0")
    world.abort(first)
    world.finish_everything()
    assert all(s.tokens for s in rest)


# ---------------------------------------------------------------- the cache


def test_after_a_reset_nothing_is_hit_and_what_runs_goes_on() -> None:
    world = new_world(200)
    runs = world.add([1] * 40, max_tokens=30)
    world.step("w0"), world.result("w0")
    world.scheduler.reset_prefix_cache()
    again = world.add([1] * 40, max_tokens=3)
    world.step("w0")
    assert world.scheduler.totals.prefix_cache_hits == 0
    world.finish_everything()
    assert runs.tokens[:3] == again.tokens


def test_the_tail_of_what_is_idle_longest_is_forgotten_first() -> None:
    world = new_world(16)
    old, new = [1] * 24, [2] * 24
    for prompt in (old, new):
        world.add(prompt, max_tokens=1)
        world.finish_everything()
    world.add([3] * 24, max_tokens=1)  # needs two blocks more than are free
    world.finish_everything()
    pool = world.scheduler.lanes["w0"].kv
    found = []
    for prompt in (old, new):
        sequence = world.add(prompt, max_tokens=1)
        found.append(len(pool.get_computed_blocks(world.scheduler.requests[sequence.num])))
    assert found == [4, 5]


# ---------------------------------------------------------------- workers


def test_what_fits_only_a_lost_worker_waits_aside_and_holds_nobody_up() -> None:
    world = new_world(40, workers=0)
    world.scheduler.add_worker("large", WorkerCapacity(400, BLOCK, 10_000))
    large = world.add([1] * 1000, max_tokens=3)
    world.scheduler.remove_worker("large", is_orderly=True)
    name = world.add_worker()
    small = [world.add([2, i], max_tokens=3) for i in range(5)]
    for _ in range(20):
        world.step(name), world.result(name)
    assert all(s.finished for s in small)
    assert large.finished is None
    assert world.scheduler.requests[large.num].status is RequestStatus.WAITING


def test_a_worker_that_leaves_in_order_blames_nobody() -> None:
    world = new_world(40, workers=0)
    sequence = world.add([1] * 5, max_tokens=5)
    for _ in range(10):
        name = world.add_worker()
        world.step(name)
        del world.workers[name]
        world.scheduler.remove_worker(name, is_orderly=True)
    world.finish_everything()
    assert len(sequence.tokens) == 5
