"""What the scheduler counts: preemptions by kind, the wait after them, steps, and time lost."""

from __future__ import annotations

import pytest

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.statistics import Histogram, Statistics
from tests.fakes.world import Sequence, World


def new_world(num_blocks: int = 64, *, num_cpu_blocks: int = 0, **config: object) -> World:
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 8, **config}
    return World(
        SchedulerConfig(**limits),  # type: ignore[arg-type]  # free keywords
        WorkerCapacity(num_blocks, 4, 10_000, num_cpu_blocks),
    )


def crowd(world: World) -> list[Sequence]:
    return [world.add([i] * 8, max_tokens=30) for i in range(6)]


@pytest.mark.parametrize(("num_cpu_blocks", "mode"), [(0, "recompute"), (100, "swap")])
def test_a_preemption_for_memory_is_counted_by_what_becomes_of_the_blocks(
    num_cpu_blocks: int, mode: str
) -> None:
    world = new_world(num_blocks=12, num_cpu_blocks=num_cpu_blocks, preemption_mode="swap")
    crowd(world)
    world.finish_everything()
    totals = world.scheduler.totals
    assert set(totals.preemptions) == {(mode, "memory")}
    assert totals.num_preemptions == totals.preemptions.total() > 0


def test_a_preemption_by_somebody_more_urgent_is_told_from_one_for_fairness() -> None:
    urgent = new_world(256, max_num_seqs=2, policy="priority")
    fair = new_world(256, max_num_seqs=2)
    for world, later in ((urgent, {"priority": 0}), (fair, {"tenant": "b"})):
        for i in range(2):
            world.add([i] * 5, max_tokens=200, priority=9)
        for _ in range(60):
            world.step("w0"), world.result("w0")
        world.add([2] * 5, max_tokens=3, **later)  # type: ignore[arg-type]  # one of two
        world.finish_everything()
    assert set(urgent.scheduler.totals.preemptions) == {("recompute", "urgency")}
    assert ("recompute", "fairness") in fair.scheduler.totals.preemptions


def test_the_wait_after_a_preemption_is_measured_until_it_runs_again() -> None:
    world = new_world()
    sequence = world.add([1] * 5, max_tokens=40)
    untouched = world.add([2] * 5, max_tokens=1)
    world.step("w0"), world.result("w0")
    world.expire()
    world.lose_worker("w0")
    assert world.scheduler.totals.preemptions["recompute", "worker_lost"] == 1
    lost_at = world.now
    world.now += 7.0
    world.step(world.add_worker())
    resumed_at = world.now
    world.finish_everything()
    assert sequence.finished is not None
    assert sequence.finished.preempted_s == pytest.approx(resumed_at - lost_at)
    assert untouched.finished is not None
    assert untouched.finished.preempted_s == 0


def test_one_that_ends_while_it_waits_has_waited_until_then() -> None:
    world = new_world()
    sequence = world.add([1] * 5, max_tokens=40)
    world.step("w0"), world.result("w0")
    world.expire()
    world.lose_worker("w0")
    world.now += 3.0
    world.expire()
    world.abort(sequence)
    assert sequence.finished is not None
    assert sequence.finished.preempted_s == pytest.approx(3.0)


# ---------------------------------------------------------------- figures


def test_only_figures_that_changed_are_written_again() -> None:
    world = new_world()
    statistics = Statistics(world.scheduler, 3)
    first = statistics.changes(now=1.0)
    assert first == statistics.figures() | statistics.histograms()
    assert first["epoch"] == 3
    assert statistics.changes(now=1.1) == {}
    world.add([1] * 5)
    assert statistics.changes(now=1.2) == {"num_requests_waiting": 1, "prompt_tokens_total": 5}


def test_histograms_are_written_twice_a_second_and_none_is_forgotten() -> None:
    statistics = Statistics(new_world().scheduler, 1)
    statistics.changes(now=1.0)
    statistics.note_result("w", 1, now=1.0, has_more=True)
    statistics.note_result("w", 1, now=1.1, has_more=False)
    assert "step_overhead_seconds" not in statistics.changes(now=1.4)
    assert "step_overhead_seconds" in statistics.changes(now=1.5)
    assert "step_overhead_seconds" not in statistics.changes(now=2.5), "it has not changed since"


def test_each_step_is_counted_with_its_tokens() -> None:
    world = new_world()
    statistics = Statistics(world.scheduler, 1)
    statistics.note_step()  # one that only tells something
    world.add([1] * 5, max_tokens=3)
    for _ in range(2):
        world.step("w0"), world.result("w0")
        statistics.note_step()
    buckets = dict(one.split("=") for one in str(statistics.histograms()["step_tokens"]).split())
    assert (buckets["1"], buckets["8"], buckets["+Inf"], buckets["sum"]) == ("1", "1", "0", "6")


def test_overhead_is_what_passes_between_results_while_there_are_steps_to_do() -> None:
    statistics = Statistics(new_world().scheduler, 1)
    statistics.note_result("w", 5_000, now=1.000, has_more=True)
    statistics.note_result("w", 5_000, now=1.007, has_more=False)  # 2 ms more than the step took
    statistics.note_result("w", 5_000, now=9.000, has_more=True)  # it was idle: nobody's fault
    statistics.note_result("v", 5_000, now=9.001, has_more=False)  # another worker
    overhead = str(statistics.histograms()["step_overhead_seconds"])
    assert overhead.endswith("sum=0.002")
    assert sum(int(one.split("=")[1]) for one in overhead.split()[:-1]) == 1
    assert statistics.figures()["device_us_total"] == 20_000


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    histogram = Histogram((0.5, 1.0))
    for value in (0.5, 0.6, 1.0, 2.0):
        histogram.observe(value)
    assert str(histogram) == "0.5=1 1.0=2 +Inf=1 sum=4.1"
