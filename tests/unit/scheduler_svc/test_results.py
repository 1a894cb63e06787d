"""What the core makes of results: those that do not fit, and those that tell of errors."""

from __future__ import annotations

import pytest

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from tests.unit.scheduler_svc.small_worlds import BLOCK, new_world, prompt, request
from wire.messages import ModelRunnerOutput, RequestError, token_ids


def scheduler_with_a_step() -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(), epoch=3)
    scheduler.add_worker("w", WorkerCapacity(8, BLOCK, 100))
    scheduler.add_request(1, request(prompt(5)), 0.0)
    assert scheduler.schedule("w", 0.0) is not None
    return scheduler


@pytest.mark.parametrize(
    ("worker", "epoch", "step_id"), [("x", 3, 1), ("w", 2, 1), ("w", 4, 1), ("w", 3, 2)]
)
def test_a_result_that_nobody_waits_for_is_counted_and_dropped(
    worker: str, epoch: int, step_id: int
) -> None:
    scheduler = scheduler_with_a_step()
    late = ModelRunnerOutput(epoch, step_id, token_ids([1]))
    assert scheduler.update_from_output(worker, late)
    assert scheduler.totals.num_ignored == 1
    assert not scheduler.take_outputs().reqs


def test_a_result_counts_once() -> None:
    scheduler = scheduler_with_a_step()
    result = ModelRunnerOutput(3, 1, token_ids([1]))
    assert scheduler.update_from_output("w", result)
    assert scheduler.update_from_output("w", result)
    assert scheduler.take_outputs().token_ids == [1]


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_result_with_too_few_or_too_many_tokens_is_not_trusted(tokens: list[int]) -> None:
    scheduler = scheduler_with_a_step()
    assert not scheduler.update_from_output("w", ModelRunnerOutput(3, 1, token_ids(tokens)))


def test_a_failed_step_is_not_trusted() -> None:
    scheduler = scheduler_with_a_step()
    assert not scheduler.update_from_output("w", ModelRunnerOutput(3, 1, failed="out of memory"))


def test_an_error_of_one_request_ends_that_request_alone() -> None:
    scheduler = scheduler_with_a_step()
    scheduler.add_request(2, request(prompt(6, start=7)), 0.0)
    assert scheduler.schedule("w", 0.0) is not None
    scheduler.update_from_output("w", ModelRunnerOutput(3, 1, token_ids([1])))
    errors = [RequestError(2, "the logits are not finite")]
    scheduler.update_from_output("w", ModelRunnerOutput(3, 2, token_ids([4, 0]), errors))
    outputs = scheduler.take_outputs()
    assert outputs.token_ids == [1, 4]
    (end,) = outputs.finished
    assert (end.req, end.error_code, end.error) == (2, "internal", "the logits are not finite")
    scheduler.check_integrity()


def test_nobody_hits_what_a_request_computed_that_went_wrong() -> None:
    scheduler = Scheduler(SchedulerConfig(), epoch=3)
    scheduler.add_worker("w", WorkerCapacity(64, BLOCK, 100))
    for num, is_wrong in ((1, True), (2, False), (3, False)):
        scheduler.add_request(num, request(prompt(5 * BLOCK), max_tokens=1), 0.0)
        assert scheduler.schedule("w", 0.0) is not None
        errors = [RequestError(num, "the logits are not finite")] if is_wrong else []
        scheduler.update_from_output("w", ModelRunnerOutput(3, num, token_ids([1]), errors))
    hits = [started.num_cached_tokens for started in scheduler.take_outputs().started]
    assert hits == [0, 0, 4 * BLOCK]
    scheduler.check_integrity()


def test_what_went_wrong_is_not_found_however_it_ended() -> None:
    """Also blocks that were full and not yet published when the request failed."""
    world = new_world()
    guilty = world.add(prompt(BLOCK), max_tokens=40)
    for _ in range(2 * BLOCK + 1):
        world.step("w0")
        world.result("w0")
    world.sicken(guilty)
    world.finish_everything()
    assert guilty.finished is not None
    assert guilty.finished.finish_reason == "error"
    again = world.add([*prompt(BLOCK), *guilty.tokens], max_tokens=4)
    world.finish_everything()
    assert len(again.tokens) == 4
    assert world.scheduler.totals.prefix_cache_hits == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_whoever_hit_blocks_that_went_wrong_starts_over_without_them(depth: int) -> None:
    world = new_world(depth=depth)
    guilty = world.add(prompt(5 * BLOCK), max_tokens=3)
    world.sicken(guilty)
    innocent = [world.add(prompt(5 * BLOCK), max_tokens=length) for length in (1, 9)]
    world.finish_everything()
    assert world.scheduler.totals.prefix_cache_hits > 0
    assert guilty.finished is not None
    assert guilty.finished.finish_reason == "error"
    for one in innocent:
        assert one.finished is not None
        assert one.finished.finish_reason == "length"
