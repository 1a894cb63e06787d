"""When a client should come again follows from how fast the pool is."""

from __future__ import annotations

from gateway.errors import RETRY_SOON_S
from gateway.service_rate import LONGEST_S, ServiceRate


def stats(tokens: int, *, epoch: int = 1, running: int = 3, waiting: int = 0) -> dict[str, str]:
    return {
        "epoch": str(epoch),
        "generation_tokens_total": str(tokens),
        "num_requests_running": str(running),
        "num_requests_waiting": str(waiting),
    }


def measured(tokens_per_s: int, tokens_per_request: int) -> ServiceRate:
    rate = ServiceRate()
    for second in range(60):
        rate.note(stats(second * tokens_per_s), float(second))
    rate.note_end(tokens_per_request)
    return rate


def test_the_time_is_that_of_serving_what_waits() -> None:
    assert measured(100, 50).seconds_for(20) == 10
    assert measured(200, 50).seconds_for(20) == 5
    assert measured(100, 100).seconds_for(20) == 20


def test_it_has_bounds() -> None:
    assert measured(1000, 1).seconds_for(1) == RETRY_SOON_S
    assert measured(1, 1000).seconds_for(1000) == LONGEST_S
    assert measured(0, 10).seconds_for(5) == LONGEST_S


def test_nobody_is_kept_away_by_a_rate_that_is_not_known() -> None:
    assert ServiceRate().seconds_for(1000) == RETRY_SOON_S
    only_length = ServiceRate()
    only_length.note_end(50)
    assert only_length.seconds_for(1000) == RETRY_SOON_S


def test_time_without_work_says_nothing_of_the_rate() -> None:
    rate = measured(100, 50)
    for second in range(60, 200):
        rate.note(stats(5900, running=0), float(second))
    assert rate.seconds_for(20) == 10


def test_time_in_which_all_wait_does() -> None:
    rate = measured(100, 50)
    for second in range(60, 200):
        rate.note(stats(5900, running=0, waiting=5), float(second))
    assert rate.seconds_for(20) == LONGEST_S


def test_counters_that_begin_anew_are_no_step_back() -> None:
    rate = measured(100, 50)
    rate.note(stats(0, epoch=2), 60.0)
    rate.note(stats(100, epoch=2), 61.0)
    rate.note({}, 62.0)
    assert rate.seconds_for(20) == 10


def test_it_follows_a_change_within_some_seconds() -> None:
    rate = measured(100, 50)
    for second in range(1, 60):
        rate.note(stats(5900 + second * 200), 59.0 + second)
    assert rate.seconds_for(20) in (5, 6)
    for _ in range(60):
        rate.note_end(100)
    assert rate.seconds_for(20) in (10, 11)
