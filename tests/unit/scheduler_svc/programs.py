"""Programs that a scheduler with a bug does not get through: short ones, and the property test.

Each fails if anything is mixed up, which `World` checks after every move.
"""

from __future__ import annotations

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from scheduler_svc.core.config import PreemptionMode, SchedulerConfig, WorkerCapacity
from tests.fakes.world import World
from tests.unit.scheduler_svc.test_property import NORMAL, Pool

SEARCH = settings(
    NORMAL,
    max_examples=2000,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
)


def any_program() -> None:
    """The property test."""
    run_state_machine_as_test(Pool, settings=SEARCH)


def little_memory() -> None:
    """A dozen requests that do not fit: preempted, swapped, aborted while swapped, never mixed up.

    For bugs that random programs take long to find.
    """
    for mode in ("recompute", "swap"):
        world = crowded_world(mode)
        while any(one.finished is None for one in world.sequences.values()):
            world.turn()
        assert world.scheduler.totals.num_preemptions
    world = crowded_world("swap")
    while not (swapped := list(world.scheduler.lanes["w0"].swapped)):
        world.turn()
    world.abort(world.sequences[swapped[0].num])
    world.finish_everything()


def lost_while_ending() -> None:
    """A worker is lost while the last token of a request is on its way."""
    world = crowded_world("recompute")
    while not world.scheduler.lanes["w0"].ending:
        world.turn()
    world.lose_worker("w0")
    world.finish_everything()


def room_at_once() -> None:
    """A request is preempted with tokens on their way, and the next moment there is room again."""
    world = crowded_world("recompute", depth=3)
    while (step := world.step("w0")) is None or not step.preempted_reqs:
        if step is None:
            world.result("w0")
    for sequence in list(world.sequences.values()):
        if sequence.finished is None and sequence.num not in step.preempted_reqs:
            world.abort(sequence)
    while world.scheduler.requests:
        world.turn()
    world.finish_everything()


def the_same_again() -> None:
    """A prompt of whole blocks comes twice."""
    world = World(SchedulerConfig(), WorkerCapacity(12, 4, 1000))
    for _ in range(2):
        world.add([1] * 8, max_tokens=4)
        world.finish_everything()


def said_by_another() -> None:
    """Each answer so far becomes a prompt, so that blocks are hit as soon as they have a name."""
    world = World(SchedulerConfig(64, 40), WorkerCapacity(200, 4, 1000), depth=1)
    first = world.add([1, 2, 3, 4, 5], max_tokens=24)
    while first.finished is None:
        world.add([*first.prompt, *first.tokens, 6], max_tokens=1)
        world.turn()
    world.finish_everything()


def prompts_in_pieces() -> None:
    """Two prompts begin alike, and each step computes a piece that is no whole number of blocks."""
    config = SchedulerConfig(12, 8, long_prefill_token_threshold=6)
    world = World(config, WorkerCapacity(20, 4, 1000))
    for rest in (5, 6):
        world.add([*range(1, 9), *[rest] * 12], max_tokens=4)
    world.finish_everything()


def swapped_within_its_prompt() -> None:
    """Memory runs out while a prompt is half computed, and it is swapped."""
    config = SchedulerConfig(5, 5, reserve_full_prompt=False, preemption_mode="swap")
    world = World(config, WorkerCapacity(8, 4, 1000, num_cpu_blocks=20))
    world.add([1, 2, 3], max_tokens=20)
    world.step("w0"), world.result("w0")
    world.add([6] * 26, max_tokens=3)
    while world.scheduler.requests:
        world.turn()
    assert world.scheduler.totals.num_swaps
    world.finish_everything()


def crowded_world(mode: PreemptionMode, depth: int = 2) -> World:
    config = SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=20, preemption_mode=mode)
    world = World(config, WorkerCapacity(12, 4, 1000, num_cpu_blocks=20), depth=depth)
    for i in range(12):
        world.add([i % 3 + 1] * 9 + [i], max_tokens=9 + i)
    return world
