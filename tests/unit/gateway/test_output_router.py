"""Who gets which token: once, in order, and nothing of anybody else."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output_router import MAX_HANDLE, SILENCE_S, Collector, Followed, OutputRouter
from wire.bus import Bus
from wire.messages import EngineCoreOutputs, FinishedRequest, StartedRequest, token_ids


class Routes:
    """A router, and one client that waits for a few sequences."""

    def __init__(self, num_sequences: int = 1) -> None:
        self.router = OutputRouter(cast("Bus", None), "g.1")  # only `run` touches the bus
        self.collector, self.followed = self.client(num_sequences)

    def client(self, num_sequences: int) -> tuple[Collector, list[Followed]]:
        collector = Collector()
        followed = [
            self.router.follow(f"r{index}-{id(collector)}", collector, index)
            for index in range(num_sequences)
        ]
        for one in followed:
            self.router.ask(one)
        return collector, followed

    @property
    def handle(self) -> int:
        return self.followed[0].handle

    def put(self, rows: list[tuple[int, int, int]], **more: Any) -> None:
        """Dispatch rows of (handle, start, token)."""
        handles, starts, tokens = ([row[i] for row in rows] for i in range(3))
        columns = token_ids(handles), token_ids(starts), token_ids(tokens)
        self.router.dispatch(EngineCoreOutputs(*columns, **more))

    def lost(self) -> list[Followed]:
        queue = self.router._lost
        return [queue.get_nowait() for _ in range(queue.qsize())]


async def take(collector: Collector) -> dict[int, list[int]]:
    return {index: delta.token_ids for index, delta in (await collector.get(0)).items()}


async def test_each_sequence_gets_its_own_tokens() -> None:
    routes = Routes(2)
    second, [third] = routes.client(1)
    a, b = (one.handle for one in routes.followed)
    routes.put([(a, 0, 10), (b, 0, 20), (third.handle, 0, 30), (a, 1, 11)])
    assert await take(routes.collector) == {0: [10, 11], 1: [20]}
    assert await take(second) == {0: [30]}
    assert await take(routes.collector) == {}


async def test_a_reader_that_is_slow_finds_one_merged_delta() -> None:
    routes = Routes()
    routes.put([], started=[StartedRequest(routes.handle, 4, 9)])
    for index in range(100):
        routes.put([(routes.handle, index, index)])
    handle = routes.handle
    routes.put([], finished=[FinishedRequest(handle, 100, "length")])
    [delta] = (await routes.collector.get(0)).values()
    assert delta.token_ids == [*range(100)]
    assert delta.started == StartedRequest(handle, 4, 9)
    assert delta.finished is not None


async def test_a_waiting_reader_is_woken() -> None:
    routes = Routes()
    waiting = asyncio.ensure_future(routes.collector.get(20))
    await asyncio.sleep(0)
    routes.put([(routes.handle, 0, 7)])
    assert (await waiting)[0].token_ids == [7]


async def test_a_token_that_comes_twice_counts_once() -> None:
    routes = Routes()
    handle = routes.handle
    routes.put([(handle, 0, 1), (handle, 1, 2)])
    routes.put([(handle, 0, 1), (handle, 1, 2), (handle, 2, 3)])
    assert await take(routes.collector) == {0: [1, 2, 3]}
    assert not routes.lost()


async def test_only_the_first_start_counts() -> None:
    routes = Routes()
    handle = routes.handle
    for num_cached in (4, 0):  # the second after a loss
        routes.put([], started=[StartedRequest(handle, num_cached, 9)])
    [delta] = (await routes.collector.get(0)).values()
    assert delta.started == StartedRequest(handle, 4, 9)


# ---------------------------------------------------------------- what is asked about


async def test_behind_a_missing_token_nothing_counts_under_the_old_handle() -> None:
    routes = Routes(2)
    torn, whole = routes.followed
    old = torn.handle
    routes.put([(old, 0, 1), (old, 3, 4), (old, 4, 5), (whole.handle, 0, 6)])
    assert await take(routes.collector) == {0: [1], 1: [6]}
    assert routes.lost() == [torn]
    routes.put([(old, 1, 2)])
    routes.put([(routes.router.ask(torn), 1, 3)])
    assert await take(routes.collector) == {0: [3]}


async def test_a_token_that_contradicts_what_the_client_has_is_not_believed() -> None:
    routes = Routes()
    [one] = routes.followed
    routes.put([(one.handle, 0, 1), (one.handle, 1, 2)])
    routes.put([(one.handle, 1, 9), (one.handle, 2, 3)])
    assert await take(routes.collector) == {0: [1, 2]}
    assert routes.lost() == [one]


async def test_an_end_that_knows_of_more_tokens_is_not_believed() -> None:
    routes = Routes()
    [one] = routes.followed
    routes.put([(one.handle, 0, 1)], finished=[FinishedRequest(one.handle, 3, "length")])
    [delta] = (await routes.collector.get(0)).values()
    assert delta.finished is None
    assert routes.lost() == [one]


async def test_what_the_scheduler_does_not_know_is_asked_about() -> None:
    routes = Routes()
    [one] = routes.followed
    routes.put([], unknown=[one.handle, 12345])
    assert one.was_denied
    assert routes.lost() == [one]


async def test_a_report_without_a_handle_counts_unless_it_was_asked_for_just_now() -> None:
    routes = Routes(4)
    just, long, held, never = routes.followed
    just.asked_at = time.monotonic()
    long.asked_at = held.asked_at = time.monotonic() - 2 * SILENCE_S
    routes.put([], held=token_ids([held.handle, 77]))
    assert routes.lost() == [long]
    assert never.handle  # its submission is still under way
    routes.put([], held=token_ids([held.handle]))
    assert not routes.lost()  # once is enough


async def test_what_nobody_waits_for_any_more_is_not_asked_about() -> None:
    routes = Routes(2)
    left, kept = routes.followed
    routes.router.lose(left)
    routes.router.lose(kept)
    assert routes.router.leave(left, routes.collector)
    assert await routes.router.next_lost() is kept


# ---------------------------------------------------------------- several clients


async def test_a_second_client_of_a_sequence_gets_all_of_it() -> None:
    routes = Routes()
    [one] = routes.followed
    routes.put([(one.handle, 0, 1)], started=[StartedRequest(one.handle, 2, 3)])
    second = Collector()
    assert routes.router.follow(one.req_id, second, 5) is one
    routes.put([(one.handle, 1, 2)], finished=[FinishedRequest(one.handle, 2, "length")])
    for collector, index in ((routes.collector, 0), (second, 5)):
        delta = (await collector.get(0))[index]
        assert delta.token_ids == [1, 2]
        assert delta.started is not None
        assert delta.finished is not None


async def test_only_the_last_to_leave_is_the_last() -> None:
    routes = Routes()
    [one] = routes.followed
    second = Collector()
    routes.router.follow(one.req_id, second, 0)
    assert not routes.router.leave(one, routes.collector)
    routes.put([(one.handle, 0, 1)])
    assert await take(second) == {0: [1]}
    assert await take(routes.collector) == {}
    assert routes.router.leave(one, second)


async def test_whoever_leaves_late_leaves_a_newcomer_alone() -> None:
    routes = Routes()
    [one] = routes.followed
    routes.router.end(one, FinishedRequest(one.handle, 0, "stop"))
    newcomer = Collector()
    anew = routes.router.follow(one.req_id, newcomer, 0)
    assert anew is not one
    routes.router.leave(one, routes.collector)
    assert routes.router.follow(one.req_id, Collector(), 0) is anew


# ---------------------------------------------------------------- the rest


async def test_tokens_and_their_end_may_share_a_message() -> None:
    routes = Routes()
    handle = routes.handle
    routes.put([(handle, 0, 1)], finished=[FinishedRequest(handle, 1, "stop")])
    [delta] = (await routes.collector.get(0)).values()
    assert delta.token_ids == [1]
    assert delta.finished is not None


async def test_what_comes_for_a_sequence_that_was_left_is_dropped() -> None:
    routes = Routes()
    [one] = routes.followed
    handle = one.handle
    routes.router.leave(one, routes.collector)
    routes.put([(handle, 0, 1)], finished=[FinishedRequest(handle, 1, "stop")])
    routes.put([(12345, 0, 1)])
    assert await take(routes.collector) == {}


def test_handles_are_never_given_twice_in_a_row_and_fit_the_wire() -> None:
    routes = Routes()
    routes.router._last_handle = MAX_HANDLE - 1
    _, followed = routes.client(3)
    handles = [one.handle for one in followed]
    assert handles == [MAX_HANDLE, 1, 2]
    token_ids(handles)


async def test_columns_of_unequal_length_are_refused() -> None:
    broken = EngineCoreOutputs(token_ids([1, 1]), token_ids([0]), token_ids([5]))
    with pytest.raises(ValueError, match="zip"):
        Routes().router.dispatch(broken)


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=1, max_size=30))
async def test_any_order_of_repeats_and_contradictions_gives_a_prefix(
    rows: list[tuple[int, bool]],
) -> None:
    """Whatever comes, a client has a prefix of the truth; what does not fit is asked about."""
    routes = Routes()
    [one] = routes.followed
    num_lost = 0
    for start, says_so in rows:
        has = len(one.output)
        is_true = says_so or start == has  # nobody can tell of the next one
        routes.put([(one.handle, start, 100 + start if is_true else 5)])
        expected = [] if start <= has and is_true else [one]
        assert routes.lost() == expected
        num_lost += len(expected)
        if expected:
            routes.router.ask(one)
    assert list(one.output) == [100 + index for index in range(len(one.output))]
    assert (await take(routes.collector)).get(0, []) == list(one.output)
