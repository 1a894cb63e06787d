"""An event's id says what the client has; with it, exactly the rest is new."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.positions import Numbering, position_from

EVENTS = st.lists(st.integers(0, 2), max_size=30)  # by choice
CLOSING = -1


def ids(numbering: Numbering, events: list[int]) -> list[str | None]:
    return [
        numbering.next_closing() if event == CLOSING else numbering.next_of(event)
        for event in events
    ]


def test_ids_count_the_events_of_each_choice() -> None:
    events = [0, 1, 0, 0, 1, CLOSING, CLOSING]
    assert ids(Numbering("r", 2, has_opening=True), events) == [
        *("r/0,", "r/0,0", "r/1,0", "r/2,0", "r/2,1", "r/2,1/1", "r/2,1/2"),
    ]
    assert ids(Numbering("r", 1, has_opening=False), [0, 0, CLOSING]) == ["r/1", "r/2", "r/2/1"]


def test_without_a_request_nothing_has_an_id_and_everything_is_sent() -> None:
    assert ids(Numbering("", 1, has_opening=True), [0, 0, CLOSING]) == ["", "", ""]


@given(EVENTS, EVENTS, st.data(), st.booleans())
def test_behind_any_event_come_those_that_the_client_lacks(
    first: list[int], second: list[int], data: st.DataObject, has_opening: bool
) -> None:
    """In whatever order another gateway gets to them, each choice goes on where it was."""
    order = data.draw(st.permutations(first)) if len(first) < 8 else sorted(first)
    events = [*first, *second, CLOSING, CLOSING]
    given_ids = ids(Numbering("r", 3, has_opening=has_opening), events)
    had = data.draw(st.integers(1, len(events)))
    have = position_from(str(given_ids[had - 1]), "r", 3)
    again = Numbering("r", 3, has_opening=has_opening, have=have)
    events_again = [*order, *second, CLOSING, CLOSING]
    new = [
        event
        for event, event_id in zip(events_again, ids(again, events_again), strict=True)
        if event_id is not None
    ]
    for choice in (0, 1, 2, CLOSING):
        assert new.count(choice) == events[had:].count(choice)


def test_a_second_return_goes_on_from_both_responses() -> None:
    first = Numbering("r", 2, has_opening=False)
    assert ids(first, [0, 1, 1, 1])[-1] == "r/1,3"
    back = Numbering("r", 2, has_opening=False, have=position_from("r/1,3", "r", 2))
    assert ids(back, [0, 0]) == [None, "r/2,3"]  # choice 1 has not been read again yet
    assert not back.is_fresh


@pytest.mark.parametrize(
    "bad", ["", "r", "r/a", "s/1,2", "r/1", "r/1,2,3", "r/-1,2", "r/1,2/", "r/1,2/10", "r/1,2 "]
)
def test_what_is_no_id_of_the_stream_is_refused(bad: str) -> None:
    with pytest.raises(ApiError) as refused:
        position_from(bad, "r", 2)
    assert (refused.value.status, refused.value.param) == (400, "Last-Event-ID")
