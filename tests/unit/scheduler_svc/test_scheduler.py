"""What the core promises at its edges: capacity, order, chunks, aborts, preemption."""

from __future__ import annotations

import pytest

from scheduler_svc.core.request import RequestStatus
from tests.unit.scheduler_svc.small_worlds import BLOCK, new_world, prompt, request
from wire import codec

# ---------------------------------------------------------------- capacity


def test_a_prompt_that_fits_no_worker_is_refused_and_the_next_one_runs() -> None:
    world = new_world(num_blocks=8)
    too_long, short = world.add(prompt(8 * BLOCK + 1)), world.add(prompt(5))
    assert too_long.finished is not None
    assert too_long.finished.error_code == "invalid"
    assert "33 tokens" in (too_long.finished.error or "")
    world.finish_everything()
    assert short.finished is not None
    assert short.finished.finish_reason == "length"


def test_a_prompt_that_fills_the_cache_gets_one_token() -> None:
    world = new_world(num_blocks=8)
    sequence = world.add(prompt(8 * BLOCK), max_tokens=5)
    world.finish_everything()
    assert len(sequence.tokens) == 1
    assert sequence.finished is not None
    assert sequence.finished.finish_reason == "length"


def test_a_request_that_outgrows_the_cache_alone_ends_with_length() -> None:
    world = new_world(num_blocks=8)
    sequence = world.add(prompt(20), max_tokens=100)
    world.finish_everything()
    assert len(sequence.tokens) == 8 * BLOCK + 1 - 20


def test_a_request_ends_exactly_at_the_end_of_the_context() -> None:
    world = new_world(max_model_len=30)
    sequence = world.add(prompt(20), max_tokens=100)
    world.finish_everything()
    assert len(sequence.tokens) == 10


def test_requests_that_fit_only_one_by_one_all_end() -> None:
    world = new_world(num_blocks=10, budget=2 * BLOCK)
    sequences = [world.add(prompt(8 * BLOCK, start=i), max_tokens=4) for i in range(3)]
    world.finish_everything()
    assert all(len(s.tokens) == 4 for s in sequences)


def test_a_request_waits_while_there_is_no_worker() -> None:
    world = new_world(workers=0)
    sequence = world.add(prompt(5), max_tokens=3)
    assert sequence.finished is None
    world.finish_everything()
    assert len(sequence.tokens) == 3


def test_what_could_never_fit_is_refused_when_the_first_worker_comes() -> None:
    world = new_world(num_blocks=2, workers=0)
    sequence = world.add(prompt(50))
    world.add_worker()
    assert sequence.finished is not None
    assert sequence.finished.error_code == "invalid"


def test_without_chunks_a_prompt_above_the_budget_is_refused() -> None:
    world = new_world(budget=16, enable_chunked_prefill=False)
    refused = world.scheduler
    refused.add_request(1, request(prompt(17)), 0.0)
    (end,) = refused.take_outputs().finished
    assert end.error_code == "invalid"


# ---------------------------------------------------------------- boundaries

LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 15, 16, 17, 32, 16 + BLOCK]


@pytest.mark.parametrize("max_tokens", [1, 2, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("threshold", [0, 1, 5])
@pytest.mark.parametrize("caching", [True, False])
def test_every_boundary_gives_the_same_tokens_cold_and_cached(
    max_tokens: int, seqs: int, threshold: int, caching: bool
) -> None:
    world = new_world(
        budget=16,
        seqs=seqs,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=caching,
    )
    for length in LENGTHS:
        cold = world.add(prompt(length, start=length), max_tokens)
        world.finish_everything()
        again = world.add(prompt(length, start=length), max_tokens)
        other_end = world.add([*prompt(length - 1, start=length), 12], max_tokens)
        longer = world.add([*prompt(length, start=length), 12], max_tokens)
        world.finish_everything()
        assert again.tokens == cold.tokens
        assert len(other_end.tokens) == len(longer.tokens) == max_tokens


def test_a_repeated_prompt_hits_all_but_its_last_block() -> None:
    world = new_world()
    for _ in range(2):
        world.add(prompt(4 * BLOCK), max_tokens=1)
        world.finish_everything()
    assert world.scheduler.totals.prefix_cache_hits == 3 * BLOCK


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    world = new_world(num_blocks=200, budget=200, seqs=50)
    for i in range(20):
        world.add([*prompt(10 * BLOCK), i % 11], max_tokens=2)
    world.finish_everything()
    assert world.scheduler.totals.prefix_cache_hits == 19 * 10 * BLOCK


def test_generated_tokens_are_cached_too() -> None:
    world = new_world()
    first = world.add(prompt(2 * BLOCK), max_tokens=2 * BLOCK)
    world.finish_everything()
    hits = world.scheduler.totals.prefix_cache_hits
    world.add([*first.prompt, *first.tokens], max_tokens=1)
    world.finish_everything()
    assert world.scheduler.totals.prefix_cache_hits - hits >= 3 * BLOCK


def test_another_salt_shares_nothing() -> None:
    world = new_world()
    for salt in (None, "a", "b", "a"):
        world.add(prompt(4 * BLOCK), max_tokens=1, salt=salt)
        world.finish_everything()
    assert world.scheduler.totals.prefix_cache_hits == 3 * BLOCK  # the second "a" only


# ---------------------------------------------------------------- the long and the short


def test_those_that_decode_are_in_every_step_beside_a_long_prompt() -> None:
    world = new_world(num_blocks=1000, budget=32, seqs=20)
    decoding = [world.add(prompt(3, start=i), max_tokens=200) for i in range(5)]
    while not all(s.tokens for s in decoding):
        world.step("w0"), world.result("w0")
    world.add(prompt(64 * 32), max_tokens=1)
    for _ in range(60):
        before = [len(s.tokens) for s in decoding]
        world.step("w0"), world.result("w0")
        assert [len(s.tokens) for s in decoding] == [n + 1 for n in before]
    world.finish_everything()


def test_the_threshold_lets_short_prompts_start_beside_a_long_one() -> None:
    world = new_world(num_blocks=1000, budget=32, seqs=20, long_prefill_token_threshold=8)
    long = world.add(prompt(64 * 8), max_tokens=1)
    short = [world.add(prompt(8, start=i), max_tokens=1) for i in range(9)]
    for _ in range(6):
        world.step("w0"), world.result("w0")
    assert all(s.finished for s in short)
    assert long.finished is None
    world.finish_everything()


def test_the_threshold_does_not_slow_a_request_that_is_alone() -> None:
    world = new_world(budget=32, long_prefill_token_threshold=8)
    world.add(prompt(32), max_tokens=1)
    step = world.step("w0")
    assert step is not None
    assert step.new_reqs[0].num_scheduled_tokens == 32


# ---------------------------------------------------------------- preemption


def test_many_requests_in_little_memory_all_end_with_few_preemptions() -> None:
    world = new_world(num_blocks=12, budget=32, seqs=20)
    sequences = [world.add(prompt(6, start=i), max_tokens=12) for i in range(20)]
    world.finish_everything()
    assert world.scheduler.totals.num_preemptions > 0
    ends = [s.finished.num_preemptions for s in sequences if s.finished is not None]
    assert max(ends) <= 4


@pytest.mark.parametrize("num_tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 9])
@pytest.mark.parametrize("seed", [None, 7])
def test_a_lost_worker_changes_no_token(num_tokens: int, seed: int | None) -> None:
    world = new_world(budget=8)
    sequence = world.add(prompt(10), max_tokens=20, seed=seed)
    while len(sequence.tokens) < num_tokens:
        world.step("w0"), world.result("w0")
    world.step("w0")  # one more is on its way
    world.lose_worker("w0")
    world.add_worker()
    world.finish_everything()
    assert sequence.tokens == world.want(sequence)


def test_a_preempted_request_comes_back_before_those_that_came_later() -> None:
    world = new_world(seqs=1)
    first, second = world.add(prompt(5), max_tokens=5), world.add(prompt(6), max_tokens=5)
    world.step("w0")
    world.lose_worker("w0")
    world.add_worker()
    world.step("w1")
    assert world.scheduler.requests[first.num].status is not RequestStatus.WAITING
    assert world.scheduler.requests[second.num].status is RequestStatus.WAITING
    world.finish_everything()


# ---------------------------------------------------------------- aborts


@pytest.mark.parametrize("when", ["waiting", "between chunks", "step in flight", "all in flight"])
def test_an_abort_at_any_moment_frees_every_block(when: str) -> None:
    world = new_world(budget=8)
    sequence = world.add(prompt(12), max_tokens=2)
    if when != "waiting":
        world.step("w0")
    if when == "between chunks":
        world.result("w0")
    if when == "all in flight":
        world.step("w0"), world.result("w0"), world.step("w0")
    world.abort(sequence)
    assert sequence.finished is not None
    assert sequence.finished.finish_reason == "abort"
    world.finish_everything()


def test_a_second_abort_and_one_of_a_stranger_are_counted_and_ignored() -> None:
    world = new_world()
    sequence = world.add(prompt(5))
    world.abort(sequence)
    world.abort(sequence)
    world.scheduler.abort_request(999)
    assert world.scheduler.totals.num_ignored == 2


def test_a_stop_string_ends_a_request_at_its_token() -> None:
    world = new_world()
    sequence = world.add(prompt(5), max_tokens=50)
    for _ in range(9):
        world.step("w0"), world.result("w0")
    outputs_before = len(sequence.tokens)
    world.scheduler.abort_request(sequence.num, "stop", 3)
    (end,) = world.scheduler.take_outputs().finished
    assert (end.finish_reason, end.num_output_tokens) == ("stop", 3)
    assert outputs_before > 3


# ---------------------------------------------------------------- several workers


def test_requests_spread_over_workers() -> None:
    world = new_world(workers=2)
    for i in range(8):
        world.add(prompt(9, start=i), max_tokens=4)
    for name in world.workers:
        world.step(name)
    assert all(3 <= len(lane.running) <= 5 for lane in world.scheduler.lanes.values())
    world.finish_everything()


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    world = new_world(num_blocks=200, budget=200, workers=2)
    world.add(prompt(20 * BLOCK), max_tokens=1)
    world.step("w0")  # takes it
    world.finish_everything()
    again = world.add(prompt(20 * BLOCK), max_tokens=1)
    world.step("w1")
    assert world.scheduler.requests[again.num].status is RequestStatus.WAITING
    world.step("w0")
    assert world.scheduler.requests[again.num].worker == "w0"
    world.finish_everything()


# ---------------------------------------------------------------- the message


def test_an_unchanged_batch_is_a_message_of_a_few_bytes() -> None:
    world = new_world(num_blocks=2000, budget=512, seqs=256)
    for i in range(256):
        world.add(prompt(1, start=i), max_tokens=30)
    for _ in range(3):
        world.step("w0"), world.result("w0")
    step = world.step("w0")
    assert step is not None
    assert step.num_decodes == 256
    assert len(codec.encode(step)) < 32
    world.finish_everything()


# ---------------------------------------------------------------- requests that kill workers


def test_a_request_that_kills_workers_is_found_and_its_neighbours_are_spared() -> None:
    world = new_world(workers=0)
    innocent = [world.add(prompt(5, start=i), max_tokens=30) for i in range(6)]
    guilty = world.add(prompt(9), max_tokens=30)
    num_losses = 0
    while guilty.finished is None:
        assert num_losses < 10, "the guilty request is never found"
        name = world.add_worker()
        for _ in range(400):
            world.step(name)
            if guilty.num in {r.num for r in world.scheduler.lanes[name].running}:
                break  # the worker dies of this step
            world.result(name)
        world.lose_worker(name)
        num_losses += 1
    assert guilty.finished.error_code == "internal"
    assert "alone" in (guilty.finished.error or "")
    world.finish_everything()
    assert all(len(s.tokens) == 30 for s in innocent)
    assert num_losses <= 6


def test_losses_with_progress_between_them_blame_nobody() -> None:
    world = new_world(workers=0)
    sequence = world.add(prompt(5), max_tokens=40)
    for _ in range(10):
        name = world.add_worker()
        for _ in range(3):
            world.step(name), world.result(name)
        world.lose_worker(name)
    assert sequence.finished is None
    world.finish_everything()
    assert sequence.tokens == world.want(sequence)
