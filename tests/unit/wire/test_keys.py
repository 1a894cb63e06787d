"""Request numbers stand for entry ids, in the same order; keys of a pool share its hash tag."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import keys
from wire.keys import Keys

ENTRY_IDS = st.tuples(st.integers(0, 2**42 - 1), st.integers(0, 2**21 - 1))


def name(entry: tuple[int, int]) -> str:
    return f"{entry[0]}-{entry[1]}"


@given(ENTRY_IDS)
def test_a_request_number_is_its_entry_id_and_back(entry: tuple[int, int]):
    number = keys.request_number(name(entry))
    assert keys.entry_id(number) == name(entry)
    assert keys.arrival_ms(number) == entry[0]
    assert 0 <= number < 2**63


@given(ENTRY_IDS, ENTRY_IDS)
def test_request_numbers_keep_the_order_of_arrival(one: tuple[int, int], two: tuple[int, int]):
    assert (one < two) == (keys.request_number(name(one)) < keys.request_number(name(two)))


def test_request_numbers_grow_while_the_clock_of_redis_goes_back():
    # Redis then keeps the millisecond of the last entry and counts on.
    arrivals = ["1800000000000-0", "1800000000000-1", "1800000000000-2", "1800000000001-0"]
    numbers = [keys.request_number(entry) for entry in arrivals]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("entry", ["1-2097152", "4398046511104-0", "x-1", "1", "", "1-2-3"])
def test_an_id_that_does_not_fit_is_refused(entry: str):
    with pytest.raises(ValueError):
        keys.request_number(entry)


def test_every_key_of_a_pool_lies_on_one_node_of_a_cluster_and_is_its_own():
    pool = Keys("a")
    spelled = []
    for method_name, method in inspect.getmembers(pool, inspect.ismethod):
        if not method_name.startswith("_"):
            spelled.append(method(*("x" for _ in inspect.signature(method).parameters)))
    assert len(spelled) > 15
    assert len(set(spelled)) == len(spelled)
    assert all(key.startswith("ps:{a}:") for key in spelled)
    assert not set(spelled) & {key.replace("{a}", "{b}") for key in spelled}


def test_the_keys_that_people_type_are_as_documented():
    pool = Keys("default")
    assert pool.stats() == "ps:{default}:stats"
    assert pool.waiting() == "ps:{default}:waiting"
    assert pool.request("r") == "ps:{default}:req:r"
    assert pool.blocks("w") == "ps:{default}:blocks:w"
    assert pool.requests() == "ps:{default}:requests"
    assert pool.steps("w.1") == "ps:{default}:steps:w.1"
