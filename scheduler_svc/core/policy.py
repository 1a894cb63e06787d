"""Who goes first: one small class a policy.

A policy gives each request a rank once, when it arrives, and the rank never changes: nothing is
ever sorted again. Ageing fits into that, because it is linear in time. That a request gains one
level of priority for every S seconds it has waited compares two requests alike at any moment, so it
is the same as adding arrival / S to the rank.
"""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request

MS_PER_TOKEN = 10
"""sjf: a request that is longer by one token yields to those that come up to this much later."""

NO_DEADLINE_S = 3600
"""deadline: one without any ranks as if it had this much time."""


class Policy(Protocol):
    """An order of requests."""

    preempts: bool  # whether `may_preempt` can be true at all

    def rank(self, request: Request, num_cached_tokens: int) -> int:
        """Lower goes first; equal ranks go in order of arrival."""
        ...

    def may_preempt(self, urgent: Request, victim: Request) -> bool:
        """Whether a waiting request may take the place of a running one."""
        ...


class Fcfs:
    """First come, first served."""

    preempts = False

    def rank(self, request: Request, num_cached_tokens: int) -> int:
        """Arrival alone decides."""
        return 0

    def may_preempt(self, urgent: Request, victim: Request) -> bool:
        """Nobody jumps the queue."""
        return False


class Priority:
    """The client's priority, lower first; what waits long enough is served whatever it has."""

    preempts = True

    def __init__(self, ageing_s: float) -> None:
        self._ageing_ms = round(ageing_s * 1000)

    def rank(self, request: Request, num_cached_tokens: int) -> int:
        """Priority, as far as ageing does not make up for it."""
        if self._ageing_ms == 0:
            return request.priority
        return request.priority * self._ageing_ms + round(request.arrival * 1000)

    def may_preempt(self, urgent: Request, victim: Request) -> bool:
        """Only one that is strictly more urgent: equals would take turns for ever."""
        return urgent.priority < victim.priority and urgent.order < victim.order


class ShortestJobFirst:
    """The least expected work first: prompt tokens not in the cache, and the output to come."""

    preempts = False

    def rank(self, request: Request, num_cached_tokens: int) -> int:
        """Work in tokens against time of arrival."""
        expected = request.sampling.max_tokens
        if learnt := request.tenant.mean_output:
            expected = min(expected, round(learnt))
        work = request.num_prompt_tokens - num_cached_tokens + expected
        return work * MS_PER_TOKEN + round(request.arrival * 1000)

    def may_preempt(self, urgent: Request, victim: Request) -> bool:
        """A short job waits for a place like everybody."""
        return False


class EarliestDeadlineFirst:
    """Whoever must be done first goes first."""

    preempts = False

    def rank(self, request: Request, num_cached_tokens: int) -> int:
        """Time of the deadline."""
        deadline = request.deadline
        if deadline is None:
            deadline = request.arrival + NO_DEADLINE_S
        return round(deadline * 1000)

    def may_preempt(self, urgent: Request, victim: Request) -> bool:
        """A deadline gives a place in the queue, not somebody else's."""
        return False


def policy_of(config: SchedulerConfig) -> Policy:
    """Make the policy that the configuration names."""
    match config.policy:
        case "fcfs":
            return Fcfs()
        case "priority":
            return Priority(config.priority_ageing_s)
        case "sjf":
            return ShortestJobFirst()
        case "deadline":
            return EarliestDeadlineFirst()
