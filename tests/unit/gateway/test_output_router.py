"""Who gets which token: once, in order, and nothing of anybody else."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.output_router import MAX_HANDLE, Collector, OutputRouter
from wire.bus import Bus
from wire.messages import EngineCoreOutputs, FinishedRequest, StartedRequest, token_ids


def router() -> OutputRouter:
    return OutputRouter(cast("Bus", None), "g.1")  # only `run` touches the bus


def outputs(rows: list[tuple[int, int, int]], **more: Any) -> EngineCoreOutputs:
    """Rows of (handle, start, token)."""
    handles, starts, tokens = ([row[i] for row in rows] for i in range(3))
    return EngineCoreOutputs(token_ids(handles), token_ids(starts), token_ids(tokens), **more)


async def take(collector: Collector) -> dict[int, list[int]]:
    return {index: delta.token_ids for index, delta in (await collector.get(0)).items()}


async def test_each_sequence_gets_its_own_tokens() -> None:
    routes = router()
    first, second = routes.open(2), routes.open(1)
    a, b = first.handles
    [c] = second.handles
    routes.dispatch(outputs([(a, 0, 10), (b, 0, 20), (c, 0, 30), (a, 1, 11)]))
    assert await take(first) == {0: [10, 11], 1: [20]}
    assert await take(second) == {0: [30]}
    assert await take(first) == {}


async def test_a_reader_that_is_slow_finds_one_merged_delta() -> None:
    routes = router()
    collector = routes.open(1)
    [handle] = collector.handles
    routes.dispatch(outputs([], started=[StartedRequest(handle, 4, 9)]))
    for index in range(100):
        routes.dispatch(outputs([(handle, index, index)]))
    routes.dispatch(outputs([], finished=[FinishedRequest(handle, 100, "length")]))
    [delta] = (await collector.get(0)).values()
    assert delta.token_ids == [*range(100)]
    assert delta.started == StartedRequest(handle, 4, 9)
    assert delta.finished is not None


async def test_a_waiting_reader_is_woken() -> None:
    routes = router()
    collector = routes.open(1)
    waiting = asyncio.ensure_future(collector.get(20))
    await asyncio.sleep(0)
    routes.dispatch(outputs([(collector.handles[0], 0, 7)]))
    assert (await waiting)[0].token_ids == [7]


async def test_a_token_that_comes_twice_counts_once() -> None:
    routes = router()
    collector = routes.open(1)
    [handle] = collector.handles
    routes.dispatch(outputs([(handle, 0, 1), (handle, 1, 2)]))
    routes.dispatch(outputs([(handle, 0, 1), (handle, 1, 2), (handle, 2, 3)]))
    assert await take(collector) == {0: [1, 2, 3]}


async def test_a_missing_token_is_said_and_ends_the_sequence() -> None:
    routes = router()
    collector = routes.open(2)
    torn, whole = collector.handles
    routes.dispatch(outputs([(torn, 0, 1), (torn, 3, 4), (torn, 4, 5), (whole, 0, 6)]))
    slots = await collector.get(0)
    assert slots[0].gap == "output tokens 1 to 2 were lost"
    assert slots[0].token_ids == [1]
    assert (slots[1].gap, slots[1].token_ids) == (None, [6])


async def test_an_end_that_knows_of_more_tokens_is_a_gap() -> None:
    routes = router()
    collector = routes.open(1)
    [handle] = collector.handles
    routes.dispatch(outputs([(handle, 0, 1)], finished=[FinishedRequest(handle, 3, "length")]))
    [delta] = (await collector.get(0)).values()
    assert delta.finished is None
    assert delta.gap == "output tokens 1 to 2 were lost"


async def test_tokens_and_their_end_may_share_a_message() -> None:
    routes = router()
    collector = routes.open(1)
    [handle] = collector.handles
    routes.dispatch(outputs([(handle, 0, 1)], finished=[FinishedRequest(handle, 1, "stop")]))
    [delta] = (await collector.get(0)).values()
    assert (delta.token_ids, delta.gap) == ([1], None)
    assert delta.finished is not None


async def test_what_comes_for_a_closed_sequence_is_dropped() -> None:
    routes = router()
    collector = routes.open(1)
    [handle] = collector.handles
    routes.close(handle)
    routes.dispatch(outputs([(handle, 0, 1)], finished=[FinishedRequest(handle, 1, "stop")]))
    routes.dispatch(outputs([(12345, 0, 1)]))
    assert await take(collector) == {}


def test_handles_are_never_given_twice_in_a_row_and_fit_the_wire() -> None:
    routes = router()
    routes._last_handle = MAX_HANDLE - 1
    handles = routes.open(3).handles
    assert handles == (MAX_HANDLE, 1, 2)
    token_ids([*handles])


async def test_columns_of_unequal_length_are_refused() -> None:
    broken = EngineCoreOutputs(token_ids([1, 1]), token_ids([0]), token_ids([5]))
    with pytest.raises(ValueError, match="zip"):
        router().dispatch(broken)


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=30),
    st.integers(1, 12),
)
async def test_any_order_of_repeats_gives_a_prefix_or_a_gap(starts: list[int], size: int) -> None:
    routes = router()
    collector = routes.open(1)
    [handle] = collector.handles
    for start in starts:
        routes.dispatch(outputs([(handle, start, 100 + start)]))
    slots = await collector.get(0)
    expected = 0
    has_gap = False
    for start in starts:
        has_gap = has_gap or start > expected
        expected += start == expected and not has_gap
    if expected or has_gap:
        assert slots[0].token_ids == [100 + index for index in range(expected)]
        assert (slots[0].gap is not None) == has_gap
    else:
        assert slots == {}
