"""Who of those that wait starts on a worker in this step, and who is left for another.

Owns one walk along the line. Takes the line in its order and each request to the worker that fits
it best; one that fits nowhere now gets a worker where it waits for room, and nobody passes it.
"""

from __future__ import annotations

from scheduler_svc.core.displacement import victims_for
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.outputs import Started
from scheduler_svc.core.placement import (
    RUNNING_COST_TOKENS,
    Place,
    best_place,
    could_ever_fit,
    has_open_seat,
    load_of,
    roomiest,
    shortage_of,
)
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.request import Request

MAX_EFFORT = 4096
"""When one step stops looking along the line: about microseconds, counted by what it looked at."""


class Admission:
    """One walk along the line, for the worker of `plan`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._state = plan.state
        self._lane = plan.lane
        self._closed: set[str] = set()  # workers where somebody ahead waits for room
        self._loads: dict[str, int] = {}  # by worker, in tokens, with what was left for it
        self._effort = 0

    def run(self) -> None:
        """Let all start that may, as far as budget, seats and blocks go."""
        waiting = self._state.waiting
        if not self._is_open():
            return
        for request in waiting.walk():
            if not self._consider(request) or not self._is_open():
                return
        if not waiting:
            self._take_over_swapped()

    def _is_open(self) -> bool:
        """Whether to look at the line at all: it is long, and a full worker takes nobody."""
        if self._plan.budget <= 0 or self._effort >= MAX_EFFORT:
            return False
        if self._state.policy.preempts or len(self._state.tenants) > 1:
            return True  # a seat may be made
        return has_open_seat(self._lane, self._state.config)

    def _consider(self, request: Request) -> bool:
        """Admit a request or leave it; False if nobody behind it may pass."""
        lane, config = self._lane, self._state.config
        self._effort += 2
        if not self._is_ready(request):
            # Its last result is on its way: nobody takes its room on this worker meanwhile.
            return request.worker != lane.worker
        if self._is_left_for_another(request):
            return True
        bound = next((one for one in self._state.lanes.values() if one.bound is request), None)
        place = self._find_place(request, bound)
        if place is None and lane.worker not in self._closed and self._make_way_for(request):
            place = best_place(request, [lane], config, {})
        if place is None:
            return self._bind(request, bound)
        if self._waits_for_prefix(request, place):
            return True
        if place.lane is lane:
            return self._admit(request, place)
        self._leave_for(request, place)
        return True

    def _is_ready(self, request: Request) -> bool:
        """Whether all results of an earlier run are in: one of them may end the request."""
        if request.worker is None:
            return True
        lane = self._state.lanes.get(request.worker)
        return lane is None or lane.last_answered_step >= request.resume_after

    # ------------------------------------------------------------ where to

    def _find_place(self, request: Request, bound: Lane | None) -> Place | None:
        """Judge every worker for a request; for one that waits for room already, only this one."""
        lane, config = self._lane, self._state.config
        self._effort += 32
        if bound is None:
            lanes = [one for one in self._state.lanes.values() if one.worker not in self._closed]
            self._effort += 2 * len(lanes)
            return best_place(request, lanes, config, self._loads)
        if lane.worker in self._closed or (bound is lane and lane.is_short()):
            return None
        place = best_place(request, [lane], config, {})
        if bound is lane and place is None:
            lane.shortage = shortage_of(request, lane, config)
        return place

    def _is_left_for_another(self, request: Request) -> bool:
        """Whether another worker was found better and has not made a step since.

        So a request is judged once a step of the worker that it is left for, and not once a step
        of every worker.
        """
        if request.left_for is None:
            return False
        worker, step, cost = request.left_for
        other = self._state.lanes.get(worker)
        if other is None or other is self._lane or other.next_step != step:
            return False
        if worker in self._closed:
            return False
        self._burden(other, cost)
        return True

    def _leave_for(self, request: Request, place: Place) -> None:
        worker, cost = place.lane.worker, place.num_missing_tokens + RUNNING_COST_TOKENS
        request.left_for = (worker, place.lane.next_step, cost)
        self._burden(place.lane, cost)

    def _burden(self, lane: Lane, cost: int) -> None:
        """Count what is left for a worker as if it had it already."""
        loads, worker = self._loads, lane.worker
        loads[worker] = (loads[worker] if worker in loads else load_of(lane)) + cost

    def _bind(self, request: Request, bound: Lane | None) -> bool:
        """Let a request that fits nowhere now wait for room on one worker, where nobody passes it.

        One that no registered worker could ever hold waits aside, and holds nobody up.
        """
        lanes = self._state.lanes.values()
        if not any(could_ever_fit(request, lane) for lane in lanes):
            return True
        if bound is None:
            bound = roomiest(request, lanes)
            if bound is None:
                return False
            bound.bound, bound.shortage = request, None
        self._closed.add(bound.worker)
        return bound is not self._lane

    def _waits_for_prefix(self, request: Request, place: Place) -> bool:
        """Whether the next block it needs is one that a running prompt is about to compute."""
        missing = place.lane.kv.first_miss(request, len(place.hits))
        if missing is None:
            return False
        for other in place.lane.prefilling:
            index = other.num_published_blocks
            if index < len(other.block_hashes) and other.block_hashes[index] == missing:
                return True
        return False

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
        self._state.unbind(request)
        self._refund(request, hit_tokens)
        request.num_computed_tokens = hit_tokens
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.sampling.max_tokens, lane.capacity.max_num_tokens
        )
        self._note_start(request, hit_tokens)
        plan.join(request, n)
        self._loads.pop(lane.worker, None)  # it is more now
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
            self._plan.preempt(victim)
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
            if best_place(request, [self._lane], self._state.config, {}) is not None:
                other.drop_copies(request)
                self._state.waiting.push(request)
                return
