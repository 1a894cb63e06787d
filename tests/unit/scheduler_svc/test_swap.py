"""Swapping keeps what was computed, in order, and never holds anybody up or leaks a block."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core import preemption
from scheduler_svc.core.config import SchedulerConfig, VictimRule, WorkerCapacity
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.request import Request
from tests.fakes.world import World

BLOCK = 4


def new_world(num_cpu_blocks: int, num_blocks: int = 12, **config: Any) -> World:
    settings: dict[str, Any] = {"preemption_mode": "swap", "max_num_seqs": 20, **config}
    return World(
        SchedulerConfig(max_num_batched_tokens=64, **settings),
        WorkerCapacity(num_blocks, BLOCK, 1000, num_cpu_blocks),
    )


def lane_of(world: World) -> Lane:
    return world.scheduler.lanes["w0"]


def crowd(world: World, count: int = 6) -> None:
    for i in range(count):
        world.add([i] * 7, max_tokens=20)


def until_swapped(world: World, count: int = 1) -> list[Request]:
    while len(lane_of(world).swapped) < count:
        world.turn()
    return list(lane_of(world).swapped)


@pytest.mark.parametrize("num_cpu_blocks", [0, 1, 3, 8, 100])
def test_whatever_the_cpu_pool_holds_all_end_and_what_is_swapped_is_not_recomputed(
    num_cpu_blocks: int,
) -> None:
    world = new_world(num_cpu_blocks)
    crowd(world)
    world.finish_everything()
    totals = world.scheduler.totals
    assert totals.num_preemptions > 0
    assert (totals.num_swaps > 0) == (num_cpu_blocks >= 3)
    if num_cpu_blocks == 100:
        assert totals.num_swaps == totals.num_preemptions
        assert totals.num_recomputed_tokens == 0


def test_the_first_that_was_swapped_comes_back_first_and_before_who_waits() -> None:
    world = new_world(100)
    crowd(world, 7)
    first, second, *_ = until_swapped(world, 2)
    late = world.add([9] * 3, max_tokens=2)
    came_back = []
    while late.finished is None:
        step = world.step("w0")
        came_back += [new.req for new in step.new_reqs] if step else []
        if step is None:
            world.result("w0")
    mentioned = [
        num for num in dict.fromkeys(came_back) if num in {first.num, second.num, late.num}
    ]
    assert mentioned == [first.num, second.num, late.num]
    world.finish_everything()


def test_a_block_that_two_share_is_copied_once() -> None:
    world = new_world(100, num_blocks=40)
    shared = [1, 2, 3, 4, 5, 6, 7, 8]
    pair = [world.add([*shared, i], max_tokens=200) for i in range(2)]
    for _ in range(6):
        world.turn()
    lane = lane_of(world)
    copies = []
    for sequence in pair:
        request = world.scheduler.requests[sequence.num]
        lane.preempt(request)
        copies.append(preemption.swap_out(request, lane))
    assert len(copies[0].cpu_blocks) == 3
    assert len(copies[1].cpu_blocks) == 1, "the two shared blocks are there already"
    lane.check_integrity()


def test_blocks_that_the_device_still_caches_are_not_copied_back() -> None:
    world = new_world(100, num_blocks=40)
    sequence = world.add(list(range(10)), max_tokens=200)
    for _ in range(6):
        world.turn()
    request, lane = world.scheduler.requests[sequence.num], lane_of(world)
    lane.preempt(request)
    out = preemption.swap_out(request, lane)
    assert len(out.device_blocks) == len(request.cpu_block_ids) == 4
    back = preemption.swap_in(request, lane, request.num_computed_tokens + 1)
    assert back is not None
    assert back.cpu_blocks == out.cpu_blocks[2:], "two full blocks are where they were"
    assert lane.cpu_pool.num_free == 100


def test_copies_out_stand_in_the_step_that_may_rewrite_their_blocks() -> None:
    world = new_world(100)
    crowd(world)
    until_swapped(world)
    step = world.steps[-1]
    assert {copies.direction for copies in step.copies} == {"out"}
    saved = {block for copies in step.copies for block in copies.device_blocks}
    rewritten = {block for blocks in step.cached_reqs.new_block_ids for block in blocks}
    assert rewritten & saved, "the blocks are needed at once"
    world.finish_everything()


@pytest.mark.parametrize("when", ["copies out in flight", "swapped", "copies in in flight"])
def test_an_abort_at_any_moment_frees_both_sides(when: str) -> None:
    world = new_world(100)
    crowd(world)
    request, *_ = until_swapped(world)
    match when:
        case "swapped":
            while world.workers["w0"].flight:
                world.result("w0")
        case "copies in in flight":
            while request in list(lane_of(world).swapped):
                world.turn()
    world.abort(world.sequences[request.num])
    world.finish_everything()


def test_a_victim_that_costs_less_to_compute_anew_is_not_swapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for copied_blocks_per_s, is_swapped in ((1e6, True), (0.1, False)):
        world = new_world(100, preemption_mode="auto")
        lane_of(world).rates.note_prefill(1000, 1.0)
        lane_of(world).rates.note_copies(1000, 1000 / copied_blocks_per_s)
        monkeypatch.setattr(Lane, "learn", lambda *_: None)
        crowd(world)
        world.finish_everything()
        assert world.scheduler.totals.num_preemptions
        assert bool(world.scheduler.totals.num_swaps) == is_swapped


def test_the_victim_is_the_newest_or_the_cheapest_and_never_the_first() -> None:
    world = new_world(0, num_blocks=60)
    first, long, short, newest = (
        world.add([i] * length, max_tokens=50) for i, length in enumerate((5, 40, 9, 60))
    )
    for _ in range(10):
        world.turn()
    rules: list[tuple[VictimRule, int]] = [("newest", newest.num), ("cheapest", short.num)]
    for rule, num in rules:
        victim = preemption.choose_victim(lane_of(world), SchedulerConfig(preemption_victim=rule))
        assert victim is not None
        assert victim.num == num
    world.abort(short), world.abort(newest), world.abort(long)
    alone = preemption.choose_victim(lane_of(world), SchedulerConfig(preemption_victim="cheapest"))
    assert alone is not None
    assert alone.num == first.num
    world.finish_everything()


def test_a_swapped_request_starts_anew_elsewhere_when_its_worker_is_lost() -> None:
    world = new_world(100)
    crowd(world)
    until_swapped(world)
    world.lose_worker("w0")
    world.add_worker()
    world.finish_everything()
    assert all(len(s.tokens) == 20 for s in world.sequences.values())


def test_an_idle_worker_takes_over_what_is_stuck_in_anothers_cpu_pool() -> None:
    world = new_world(100)
    crowd(world)
    request, *_ = until_swapped(world)
    while world.workers["w0"].flight:
        world.result("w0")
    name = world.add_worker()
    for _ in range(3):
        world.step(name)
    assert request.worker == name
    world.finish_everything()


def test_a_tenant_that_was_served_less_goes_before_what_another_has_swapped() -> None:
    world = new_world(100)
    crowd(world)
    request, *_ = until_swapped(world)
    modest = world.add([9] * 3, max_tokens=2, tenant="modest")
    while request in list(lane_of(world).swapped):
        world.turn()
    assert modest.tokens or world.scheduler.requests[modest.num].was_started
    world.finish_everything()
