"""A step of few tokens gets the threads that are fastest, however the machine changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from gpu_worker.thread_choice import STAY, ThreadChoice

EVEN_ONE_IN_SEVEN = 7


def run(choice: ThreadChoice, num_steps: int, seconds_of: Callable[[int], float]) -> Counter[int]:
    """How many steps had each number of threads, where a step takes so long by their number."""
    had: Counter[int] = Counter()
    for _ in range(num_steps):
        had[choice.count] += 1
        choice.note(seconds_of(choice.count))
    return had


def first_choice(counts: list[int], seconds_of: Callable[[int], float]) -> int:
    """What the trials at the beginning lead to."""
    choice = ThreadChoice(counts)
    while not choice.is_settled:
        choice.note(seconds_of(choice.count))
    return choice.count


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.98}, 1),  # the memory is what is waited for: the others' cores stay free
        ({1: 1.0, 2: 0.85}, 2),
        ({1: 4.0, 2: 2.0, 4: 1.02, 8: 1.0}, 4),
        ({1: 0.5, 2: 0.7, 4: 0.9}, 1),  # they stand in one another's way
        ({1: 1.0, 2: 0.98, 4: 0.55}, 4),  # the second shares a core with the first
        ({1: 9.0, 2: 8.0, 4: 1.0, 8: 2.0, 16: 4.0, 32: 8.0, 48: 9.0}, 4),
    ],
)
def test_steps_get_as_few_threads_as_are_fastest(seconds: dict[int, float], best: int) -> None:
    choice = ThreadChoice(list(seconds))
    run(choice, STAY // 2, seconds.__getitem__)
    later = run(choice, 10 * STAY, seconds.__getitem__)
    assert later[best] > 0.95 * later.total()


@pytest.mark.parametrize("num_cores", [2, 4, 8, 32, 64])
def test_a_trial_costs_little_where_all_cores_help(num_cores: int) -> None:
    counts = [n for n in (1, 2, 4, 8, 16, 32) if n < num_cores] + [num_cores]
    choice = ThreadChoice(counts)
    for num_steps, most in ((STAY, 1.03), (10 * STAY, 1.015)):  # until it is sure, and then
        had = run(choice, num_steps, lambda count: 1 / count)
        assert sum(had[n] / n for n in had) <= most * num_steps / num_cores


@pytest.mark.parametrize(("slower", "num_tried"), [(1.6, 3), (1.3, 8), (1.2, 13), (1.01, 28)])
def test_what_is_less_far_behind_is_tried_for_longer(slower: float, num_tried: int) -> None:
    choice, had = ThreadChoice([1, 2]), Counter[int]()
    while not choice.is_settled:
        had[choice.count] += 1
        choice.note({1: slower, 2: 1.0}[choice.count])
    assert had[1] == num_tried * (2 if slower < 1.03 else 1), "one that wins is tried once more"


@pytest.mark.parametrize("num_steps_before", [0, 5 * STAY])
def test_a_trial_that_was_disturbed_is_made_good_soon(num_steps_before: int) -> None:
    usual, disturbed = {1: 1.0, 2: 0.8}, {1: 1.0, 2: 1.2}
    choice = ThreadChoice([1, 2])
    run(choice, num_steps_before, usual.__getitem__)
    while choice.count != 1 or not choice.is_settled:
        choice.note(disturbed[choice.count])
    run(choice, STAY // 2, usual.__getitem__)
    assert choice.count == 2


def test_when_others_come_and_go_the_choice_follows() -> None:
    alone = {1: 1.0, 2: 0.98, 3: 0.55}
    beside_others = {1: 1.1, 2: 1.4, 3: 1.6}
    choice = ThreadChoice(list(alone))
    for seconds, best in ((alone, 3), (beside_others, 1), (alone, 3)):
        run(choice, STAY + 200, seconds.__getitem__)
        later = run(choice, 10 * STAY, seconds.__getitem__)
        assert later[best] > 0.9 * later.total()


@pytest.mark.parametrize("odd_one", [9.0, 0.01])
def test_a_step_that_is_unlike_all_others_decides_nothing(odd_one: float) -> None:
    number = 0

    def seconds_of(count: int) -> float:
        nonlocal number
        number += 1
        is_odd = number % EVEN_ONE_IN_SEVEN == 0 and (count == 2) == (odd_one > 1)
        return odd_one if is_odd else {1: 1.0, 2: 0.8}[count]

    assert first_choice([1, 2], seconds_of) == 2


def test_what_disturbs_the_first_turn_of_one_decides_nothing() -> None:
    num_disturbed = 0

    def seconds_of(count: int) -> float:
        nonlocal num_disturbed
        if count == 2 and num_disturbed < 5:
            num_disturbed += 1
            return 1.3
        return {1: 1.0, 2: 0.8}[count]

    assert first_choice([1, 2], seconds_of) == 2


def test_steps_that_grow_longer_all_the_while_are_compared_by_turns() -> None:
    number = 0

    def seconds_of(count: int) -> float:
        nonlocal number
        number += 1
        return (1 + number / 100) * {1: 1.0, 2: 0.8}[count]

    assert first_choice([1, 2], seconds_of) == 2
