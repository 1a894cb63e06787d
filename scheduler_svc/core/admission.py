"""Who of those that wait starts on a worker in this step, and who is left for another.

Owns one walk along the line. Takes the line in its order and each request to the worker that fits
it best; one that fits nowhere now gets a worker where it waits for room, and nobody passes it.
"""

from __future__ import annotations

from scheduler_svc.core import ending
from scheduler_svc.core.displacement import victims_for
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.outputs import Started
from scheduler_svc.core.placement import (
    Fleet,
    Place,
    could_ever_fit,
    has_open_seat,
    place_on,
    roomiest,
    shortage_of,
)
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.request import Request

MAX_EFFORT = 128
"""Requests of the line that one step looks at, whether it admits them or not; fewer if there are
many workers to judge."""

LANES_PER_LOOK = 16
"""Workers that are judged in about the time that one look at a request takes otherwise."""

MAX_HOLD_S = 0.5
"""How long a request is kept for a worker that does not come for it."""


class Admission:
    """One walk along the line, for the worker of `plan`.

    `promised`: those that were kept for this worker since its last step.
    """

    def __init__(self, plan: Plan, promised: list[Request]) -> None:
        self._plan = plan
        self._state = plan.state
        self._lane = plan.lane
        self._promised = {request.num for request in promised}
        self._coming: dict[str, set[bytes]] = {}  # by worker, as far as asked
        self._effort = 0

    def run(self) -> None:
        """Let all start that may, as far as budget, seats and blocks go."""
        waiting = self._state.waiting
        self._recall_late_promises()
        if not self._is_open():
            return
        if not waiting:
            self._take_over_swapped()
            return
        self._bound = {one.bound: one for one in self._state.lanes.values() if one.bound}
        lanes = [one for one in self._state.lanes.values() if not one.is_late]
        self._fleet = Fleet(self._lane, lanes, self._state.config)
        for request in waiting.walk():
            if not self._consider(request) or not self._is_open():
                return

    def _is_open(self) -> bool:
        """Whether to look at the line at all: it is long, and a full worker takes nobody."""
        if self._plan.budget <= 0 or self._effort >= MAX_EFFORT:
            return False
        if self._state.policy.preempts or len(self._state.tenants) > 1:
            return True  # a seat may be made
        return has_open_seat(self._lane, self._state.config)

    def _recall_late_promises(self) -> None:
        """Nobody waits long for a worker whose step takes its time: others may have them again."""
        for worker in self._state.waiting.late(self._plan.now - MAX_HOLD_S):
            self._state.waiting.redeem(worker)
            self._state.lanes[worker].is_late = True

    def _consider(self, request: Request) -> bool:
        """Admit a request, or leave it; False if nobody behind it may pass."""
        lane, config = self._lane, self._state.config
        self._effort += 1
        if not self._is_ready(request):
            # Its last result is on its way: nobody takes its room on this worker meanwhile.
            return request.worker != lane.worker
        place = self._find_place(request)
        if place is None and self._make_way_for(request):
            place = place_on(request, lane, config)
        if place is None:
            return self._bind(request)
        if self._is_too_late_for(request, place):
            ending.fail(self._state, request, "it cannot meet its deadline", "unavailable")
            return True
        if self._waits_for_prefix(request, place):
            return True
        if place.lane is lane:
            return self._admit(request, place)
        self._state.waiting.promise(request, place.lane.worker, self._plan.now)
        self._fleet.give(place)
        return True

    def _is_ready(self, request: Request) -> bool:
        """Whether all results of an earlier run are in: one of them may end the request."""
        if request.worker is None:
            return True
        lane = self._state.lanes.get(request.worker)
        return lane is None or lane.last_answered_step >= request.resume_after

    # ------------------------------------------------------------ where to

    def _find_place(self, request: Request) -> Place | None:
        """Judge every worker for a request, or only this one if it is here as promised.

        One that waits for room on some worker already does not wait for another, but may start
        here if it can.
        """
        lane, config = self._lane, self._state.config
        bound = self._bound.get(request)
        if bound is None:
            if request.num in self._promised and (place := place_on(request, lane, config)):
                return place
            self._effort += len(self._state.lanes) // LANES_PER_LOOK
            return self._fleet.best_place(request)
        if bound is lane and lane.is_short():
            return None
        place = place_on(request, lane, config)
        if bound is lane and place is None:
            lane.shortage = shortage_of(request, lane, config)
        return place

    def _bind(self, request: Request) -> bool:
        """Let a request that fits nowhere now wait for room on one worker, where nobody passes it.

        One that no registered worker could ever hold waits aside, and holds nobody up.
        """
        bound = self._bound.get(request)
        if bound is None:
            lanes = self._state.lanes.values()
            if not any(could_ever_fit(request, lane) for lane in lanes):
                return True
            bound = roomiest(request, lanes)
            if bound is None:
                return False
            bound.bound, bound.shortage = request, None
            self._bound[request] = bound
        self._fleet.close(bound)
        return bound is not self._lane

    def _is_too_late_for(self, request: Request, place: Place) -> bool:
        """Whether even its prompt takes longer than it has, at the worker's measured rate."""
        rate = place.lane.rates.prefill_tokens_per_s
        if self._state.config.deadline_action != "refuse" or request.deadline is None or not rate:
            return False
        return self._plan.now + place.num_missing_tokens / rate > request.deadline

    def _waits_for_prefix(self, request: Request, place: Place) -> bool:
        """Whether the next block it needs is one that a running prompt is about to compute."""
        coming = self._coming_blocks(place.lane)
        return bool(coming) and place.lane.kv.first_miss(request, len(place.hits)) in coming

    def _coming_blocks(self, lane: Lane) -> set[bytes]:
        """Names of the blocks that prompts on a worker compute next, after this step."""
        if lane.worker not in self._coming:
            self._coming[lane.worker] = set()
            for request in lane.prefilling:
                self._note_coming(request, lane)
        return self._coming[lane.worker]

    def _note_coming(self, request: Request, lane: Lane) -> None:
        name = lane.kv.first_miss(request, request.num_published_blocks)
        if name is not None:
            self._coming_blocks(lane).add(name)

    # ------------------------------------------------------------ in

    def _admit(self, request: Request, place: Place) -> bool:
        plan, lane, hits = self._plan, self._lane, place.hits
        hit_tokens = len(hits) * lane.capacity.block_size
        n = min(place.num_missing_tokens, plan.budget)
        if self._state.config.enable_chunked_prefill:
            n = min(n, plan.chunk_limit())
        elif n < place.num_missing_tokens:
            return False
        if lane.kv.allocate_slots(request, hit_tokens + n, hits) is None:
            return False
        self._state.waiting.remove(request)
        self._state.tenants.admitted(request.tenant)
        if self._bound.pop(request, None) is not None:
            self._state.unbind(request)
        self._refund(request, hit_tokens)
        request.num_computed_tokens = hit_tokens
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.sampling.max_tokens, lane.capacity.max_num_tokens
        )
        self._note_start(request, hit_tokens)
        plan.join(request, n)
        self._note_coming(request, lane)
        self._fleet.give(place)
        self._fleet.look_again(lane)
        return True

    def _refund(self, request: Request, hit_tokens: int) -> None:
        """Tokens that were computed and are lost since: nobody pays twice for being preempted."""
        lost = min(request.num_computed_tokens, request.num_tokens) - hit_tokens
        if lost > 0:
            self._state.totals.num_recomputed_tokens += lost
            self._state.charge(request.tenant, -lost)

    def _note_start(self, request: Request, hit_tokens: int) -> None:
        if request.was_started:
            return
        request.was_started = True
        self._state.totals.prefix_cache_queries += request.num_tokens
        self._state.totals.prefix_cache_hits += hit_tokens
        queued = max(0.0, self._plan.now - request.arrival)
        self._state.outputs.started.append(Started(request.num, hit_tokens, queued))

    # ------------------------------------------------------------ by force

    def _make_way_for(self, request: Request) -> bool:
        """Preempt others for a waiting request, if that is certain to make room and a seat for it.

        True if it did.
        """
        policy, lane = self._state.policy, self._lane
        victims = victims_for(request, lane, self._state.config, policy, self._plan.is_unplanned)
        if not victims:
            return False
        if policy.may_preempt(request, victims[0]) and not self._is_least_urgent(victims[0]):
            return False
        for victim in victims:
            is_urgent = policy.may_preempt(request, victim)
            self._plan.preempt(victim, "urgency" if is_urgent else "fairness")
        self._fleet.look_again(lane)
        return True

    def _is_least_urgent(self, victim: Request) -> bool:
        """Whether no other worker runs somebody who should yield before this one."""
        return all(
            lane is self._lane or not len(lane.running) or lane.running[-1].order <= victim.order
            for lane in self._state.lanes.values()
        )

    # ------------------------------------------------------------ from another worker

    def _take_over_swapped(self) -> None:
        """With nobody waiting, offer to start anew here what is stuck in another's CPU pool."""
        for other in self._state.lanes.values():
            if other is self._lane or not other.swapped:
                continue
            request = other.swapped[0]
            if not self._is_ready(request) or other.kv.pool.num_free >= len(request.cpu_block_ids):
                continue
            if place_on(request, self._lane, self._state.config) is not None:
                other.drop_copies(request)
                request.life.enter("preempted", self._plan.now)
                self._state.waiting.push(request)
                return
