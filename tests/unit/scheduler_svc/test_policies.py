"""Who goes first under each policy, who makes way for whom, and what ends for lack of time."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from tests.fakes.world import Sequence, World
from wire.messages import SYSTEM_PRIORITY

BLOCK = 4


def new_world(seqs: int = 1, num_blocks: int = 64, budget: int = 64, **config: Any) -> World:
    return World(
        SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=seqs, **config),
        WorkerCapacity(num_blocks, BLOCK, 1000),
    )


def order_of_ends(world: World) -> list[int]:
    """Let everything end; the requests in the order in which they did."""
    ended: list[int] = []
    while len(ended) < len(world.sequences):
        world.step("w0"), world.result("w0")
        done = (s.num for s in world.sequences.values() if s.finished and s.num not in ended)
        ended += sorted(done)
    return ended


def running(world: World) -> set[int]:
    return {request.num for request in world.scheduler.lanes["w0"].running}


# ---------------------------------------------------------------- order


def test_fcfs_is_the_order_of_arrival() -> None:
    world = new_world()
    for i in range(5):
        world.add([i] * (9 - i), max_tokens=5 - i, priority=-i)
    assert order_of_ends(world) == [1, 2, 3, 4, 5]


def test_priority_is_lower_first_and_equals_in_order_of_arrival() -> None:
    world = new_world(policy="priority")
    for priority in (5, 0, -7, 0, 2**62, -(2**30)):
        world.add([1], max_tokens=1, priority=priority)
    assert order_of_ends(world) == [6, 3, 2, 4, 1, 5]


def test_sjf_is_the_least_expected_work_first() -> None:
    world = new_world(policy="sjf")
    for length, max_tokens in ((30, 2), (2, 20), (3, 3), (16, 1)):
        world.add([length] * length, max_tokens=max_tokens)
    assert order_of_ends(world) == [3, 4, 2, 1]


def test_sjf_counts_only_what_is_not_cached() -> None:
    world = new_world(policy="sjf")
    world.add([7] * 32, max_tokens=1)
    world.finish_everything()
    medium, cached = world.add([1] * 12, max_tokens=1), world.add([7] * 32, max_tokens=1)
    assert order_of_ends(world)[1:] == [cached.num, medium.num]


def test_sjf_learns_how_long_a_tenants_answers_are() -> None:
    world = new_world(policy="sjf")
    terse = world.add([1, 2, 3], max_tokens=1000, eos=world_end([1, 2, 3]), tenant="a")
    world.finish_everything()
    assert len(terse.tokens) < 20
    long = world.add([5] * 30, max_tokens=50, tenant="a")
    again = world.add([6] * 8, max_tokens=1000, eos=0, tenant="a")
    assert world.scheduler.requests[again.num].order < world.scheduler.requests[long.num].order


def world_end(prompt: list[int]) -> int:
    """A token that the oracle samples early for this prompt."""
    probe = new_world()
    sequence = probe.add(prompt, max_tokens=8)
    probe.finish_everything()
    return sequence.tokens[4]


def test_deadline_is_the_earliest_first_and_none_is_last() -> None:
    world = new_world(policy="deadline", deadline_action="ignore")
    for deadline_ms in (None, 900_000, 5000, 70_000):
        world.add([1], max_tokens=1, deadline_ms=deadline_ms)
    assert order_of_ends(world) == [3, 4, 2, 1]


def test_the_system_class_goes_before_everybody_under_any_policy() -> None:
    for policy in ("fcfs", "priority", "sjf", "deadline"):
        world = new_world(policy=policy)
        for priority in (-(2**30), 0, SYSTEM_PRIORITY):
            world.add([1], max_tokens=1, priority=priority)
        assert order_of_ends(world)[0] == 3


# ---------------------------------------------------------------- by force


def test_an_urgent_request_takes_a_seat_and_the_other_comes_back_before_its_equals() -> None:
    world = new_world(seqs=2, policy="priority")
    slow = [world.add([i] * 5, max_tokens=60, priority=10) for i in range(2)]
    for _ in range(3):
        world.step("w0"), world.result("w0")
    equal = world.add([5] * 5, max_tokens=5, priority=10)
    urgent = world.add([6] * 5, max_tokens=5, priority=0)
    world.step("w0")
    assert running(world) == {slow[0].num, urgent.num}
    ended = order_of_ends(world)
    assert ended.index(urgent.num) == 0
    assert ended.index(slow[1].num) < ended.index(equal.num)


def test_equals_never_take_each_others_seats() -> None:
    world = new_world(seqs=2, policy="priority", priority_ageing_s=0.1)
    for i in range(4):
        world.add([i] * 5, max_tokens=100, priority=3)
    for _ in range(150):
        world.step("w0"), world.result("w0")
    assert world.scheduler.totals.num_preemptions == 0
    world.finish_everything()


def test_when_memory_runs_out_the_least_urgent_yields_wherever_it_stands() -> None:
    world = new_world(seqs=8, num_blocks=12, policy="priority")
    mild = world.add([1] * 8, max_tokens=30, priority=10)
    urgent = [world.add([2 + i] * 8, max_tokens=30, priority=0) for i in range(3)]
    world.finish_everything()
    ends: list[Sequence] = [mild, *urgent]
    preempted = [s.finished.num_preemptions for s in ends if s.finished is not None]
    assert preempted[0] > 0
    assert preempted[1] == 0, "the first in the order yielded"


# ---------------------------------------------------------------- time


def test_a_missed_deadline_ends_a_request_wherever_it_is() -> None:
    world = new_world()
    runs, waits = (world.add([i], max_tokens=500, deadline_ms=200) for i in range(2))
    for _ in range(40):
        world.step("w0"), world.result("w0")
        world.expire()
    for sequence in (runs, waits):
        assert sequence.finished is not None
        assert (sequence.finished.error_code, sequence.finished.error) == (
            "unavailable",
            "the deadline has passed",
        )
    assert runs.tokens
    world.finish_everything()


def test_what_cannot_meet_its_deadline_is_refused_before_it_is_computed() -> None:
    for action in ("refuse", "end"):
        world = new_world(seqs=4, num_blocks=200, budget=128, deadline_action=action)
        world.scheduler.lanes["w0"].rates.note_prefill(1000, 1.0)
        late, soon = (world.add([i] * 600, deadline_ms=ms) for i, ms in ((1, 500), (2, 5000)))
        world.step("w0")
        assert (late.finished is not None) == (action == "refuse")
        assert soon.finished is None
        if late.finished is not None:
            assert late.finished.error == "it cannot meet its deadline"


@pytest.mark.parametrize("change", [{}, {"queue_timeout_s": 0.5}, {"queue_timeout_s": 0.0}])
def test_a_request_waits_for_its_first_step_no_longer_than_the_queue_timeout(
    change: dict[str, float],
) -> None:
    world = new_world(queue_timeout_s=0.2)
    runs, waits = world.add([1], max_tokens=200), world.add([2], max_tokens=3)
    world.step("w0")
    world.reconfigure(SchedulerConfig(**{**CONFIG, "queue_timeout_s": 0.2, **change}))  # type: ignore[arg-type]  # free keywords
    limit = change.get("queue_timeout_s", 0.2)
    for _ in range(60):
        world.step("w0"), world.result("w0")
        world.expire()
        is_over = bool(limit) and world.now >= limit
        assert (waits.finished is not None) == is_over
    assert runs.finished is None
    assert world.scheduler.next_wake() is None


CONFIG: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 1}
