"""What a request went through: its phases, and when each of them began. Nothing decides by it.

Costs something only when a request goes from one phase to the next, and a fixed amount of memory
however often that happens.
"""

from __future__ import annotations

from typing import Literal, get_args

Phase = Literal["waiting", "prefill", "decode", "preempted", "swapped", "lost"]
"""waiting: for the first time. preempted: for its blocks, which it had to give up. swapped: the
same, with a copy of them in the CPU pool. lost: for a worker, since its own was lost."""

PHASES: tuple[Phase, ...] = get_args(Phase)

MAX_PHASES = 32
"""Of a longer life the first and the last phases are kept; what was between counts as the first."""


class Life:
    """The phases of one request, in order."""

    __slots__ = ("phases",)

    def __init__(self, arrival: float) -> None:
        self.phases: list[tuple[Phase, float]] = [("waiting", arrival)]  # seconds, server time

    def enter(self, phase: Phase, now: float) -> None:
        """Begin the next phase, and end the one before, unless that is the same."""
        if self.phases[-1][0] == phase:
            return
        self.phases.append((phase, now))
        if len(self.phases) > MAX_PHASES:
            del self.phases[MAX_PHASES // 2 : MAX_PHASES // 2 + 2]
