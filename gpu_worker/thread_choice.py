"""How many threads steps of one size get: the fewest that have been about the fastest lately.

A step of few tokens waits for the memory, which a few threads keep busy. More of them help little,
and less than nothing where others compute on the same cores: the whole team waits for a thread that
has lost its core with work in hand. Which number is best depends on the machine and on what else it
does now, so now and then a trial finds it out, on steps that are to be run anyhow.

A trial compares the number at hand with its neighbours, in rounds, so that what disturbs one of
them disturbs all; what is far behind leaves it, after more rounds if it is less far. The first
begins with the most there are. The next one follows at once for as long as the number changes, and
after twice as many steps each time that it does not, up to a limit.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

STAY = 1000  # steps between two trials, once several have changed nothing

_FIRST_STAY = 350  # and after a change
_REACH = 2  # neighbours on either side
_ROUNDS = 6  # of a trial
_GLANCE, _TURN = 3, 5  # steps that each number gets in the first round, and in the others
_SLOWER = 1.03  # so much longer may a step take if it leaves cores to others
_FAR_BEHIND = 0.5  # so much more time, divided by the rounds that show it, is far


class ThreadChoice:
    """One of some counts of threads, chosen anew again and again."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Choose among counts, which rise."""
        self._counts = list(counts)
        self._count = self._counts[-1]
        self._stay = 0  # steps until the next trial
        self._next_stay = _FIRST_STAY
        self._ahead: deque[int] = deque()  # what the next steps of a trial's round get
        self._round = 0  # of the trial
        self._seconds: dict[int, list[float]] = {}  # by count that is still in the trial
        self._begin_trial()

    @property
    def count(self) -> int:
        """What the next step gets."""
        return self._ahead[0] if self._ahead else self._count

    @property
    def is_settled(self) -> bool:
        """Whether no trial is going on."""
        return not self._ahead

    def note(self, seconds: float) -> None:
        """Hear how long a step took, which had `count` threads."""
        if self._ahead:
            self._seconds[self._ahead.popleft()].append(seconds)
            if not self._ahead:
                self._end_round()
        elif self._stay > 0:
            self._stay -= 1
        else:
            self._begin_trial()

    def _begin_trial(self) -> None:
        place = self._counts.index(self._count)
        nearby = self._counts[max(place - _REACH, 0) : place + _REACH + 1]
        self._seconds = {count: [] for count in nearby}
        self._round = 0
        self._begin_round()

    def _begin_round(self) -> None:
        if len(self._seconds) > 1:
            self._round += 1
            turn = _GLANCE if self._round == 1 else _TURN
            self._ahead.extend(count for count in self._seconds for _ in range(turn))

    def _end_round(self) -> None:
        typical = {count: statistics.median(seconds) for count, seconds in self._seconds.items()}
        best = min(typical.values())
        for count, seconds in typical.items():
            if seconds > (1 + _FAR_BEHIND / self._round) * best:
                del self._seconds[count]
        if self._round < _ROUNDS and len(self._seconds) > 1:
            self._begin_round()
            return
        before = self._count
        self._count = min(count for count, seconds in typical.items() if seconds <= _SLOWER * best)
        if self._count != before:
            self._next_stay = _FIRST_STAY
            self._begin_trial()
        else:
            self._stay, self._next_stay = self._next_stay, min(2 * self._next_stay, STAY)
