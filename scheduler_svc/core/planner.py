"""One step of one worker: which tokens of which request it computes.

Owns the order of the stages: those that run, those that come back from the CPU pool, those that
wait (`admission`); then what is left of the budget goes to the prompts that run.

There are no phases. A request has computed tokens and known tokens, and a step lets the first catch
up with the second; a request that decodes is just one that is a single token behind.
"""

from __future__ import annotations

from scheduler_svc.core import preemption
from scheduler_svc.core.admission import Admission
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.placement import could_ever_fit, has_seat
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.request import Order, Request, RequestStatus
from scheduler_svc.core.state import State
from wire.messages import SchedulerOutput


class StepPlanner:
    """Makes the next step of `lane`."""

    def __init__(self, state: State, lane: Lane, now: float) -> None:
        self._state = state
        self._lane = lane
        self._plan = Plan(state, lane, now)

    def plan(self) -> SchedulerOutput | None:
        """Hand out the token budget. None if there is nothing to run and nothing to tell."""
        plan = self._plan
        self._lane.is_late = False
        promised = self._state.waiting.redeem(self._lane.worker)
        self._lane.retire()
        self._grow_decoding()
        self._advance_prefilling(is_capped=True)
        if not plan.has_preempted:
            if self._bring_back_swapped():
                Admission(plan, promised).run()
            self._advance_prefilling(is_capped=False)
        return None if plan.is_empty else plan.dispatch()

    # ------------------------------------------------------------ those that run

    def _grow_decoding(self) -> None:
        """All that decode run; those that cross into a new block get it, or somebody yields."""
        kv = self._lane.kv
        while kv.pool.num_free < len(due := self._lane.due_for_a_block()):
            self._make_room()
        if due:
            reqs = [request.num for request in due]
            self._plan.grown = dict(zip(reqs, kv.grow(due), strict=True))

    def _advance_prefilling(self, *, is_capped: bool) -> None:
        """Let running prompts catch up; not capped, they take what nobody else could use."""
        plan = self._plan
        for request in list(self._lane.prefilling):
            done = plan.num_planned_tokens(request)
            missing = request.num_tokens - request.num_computed_tokens - done
            while missing and request.status is RequestStatus.PREFILLING:  # until it yields itself
                n = min(missing, plan.budget)
                if is_capped:
                    n = min(n, plan.chunk_limit())
                if n == 0:
                    return
                end = request.num_computed_tokens + done + n
                blocks = self._lane.kv.allocate_slots(request, end)
                if blocks is not None:
                    plan.advance(request, n, blocks)
                    break
                if not is_capped:
                    return  # room is left, not made, for what is only a filling
                self._make_room()

    def _make_room(self) -> None:
        """Give blocks back: of requests that only end, else of one that has to yield."""
        if self._lane.release_ending():
            return
        plan = self._plan
        victim = preemption.choose_victim(self._lane, self._state.config, plan.is_unplanned)
        assert victim is not None, "a request that is alone always fits"
        plan.preempt(victim, "memory")
        plan.has_preempted = True

    # ------------------------------------------------------------ those that come back

    def _bring_back_swapped(self) -> bool:
        """Swapped requests go on before others of equal urgency begin, in the order of the line.

        False if one is left that waits for room: nobody takes it away meanwhile.
        """
        lane, state, plan = self._lane, self._state, self._plan
        if not len(lane.swapped):
            return True
        ahead = state.waiting.first()
        for request in sorted(lane.swapped, key=_place_among_tenants):
            if ahead is not None and self._goes_before(ahead, request):
                return True
            if lane.last_answered_step < request.resume_after:
                return False
            n = min(request.num_tokens - request.num_computed_tokens, plan.budget)
            if n <= 0 or not has_seat(request, lane, state.config):
                return False
            copies = preemption.swap_in(request, lane, request.num_computed_tokens + n)
            if copies is None:
                return False
            plan.copies.append(copies)
            state.totals.num_swapped_blocks += len(copies.cpu_blocks)
            plan.join(request, n)
        return True

    def _goes_before(self, ahead: Request, swapped: Request) -> bool:
        """Whether the first of the line is more urgent than one that would come back."""
        if not could_ever_fit(ahead, self._lane) or swapped.is_system:
            return False
        if ahead.is_system or self._state.policy.may_preempt(ahead, swapped):
            return True
        return ahead.tenant.virtual < swapped.tenant.virtual


def _place_among_tenants(request: Request) -> tuple[bool, float, Order]:
    return not request.is_system, request.tenant.virtual, request.order
