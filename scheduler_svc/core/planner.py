"""One step of one worker: which tokens of which request it computes.

Owns the plan while it is made. Three stages: those that run, those that come back from the CPU
pool, those that wait; then the plan becomes a message.

There are no phases. A request has computed tokens and known tokens, and a step lets the first catch
up with the second; a request that decodes is just one that is a single token behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core import preemption
from scheduler_svc.core.lane import Lane, StepRecord
from scheduler_svc.core.outputs import Started
from scheduler_svc.core.placement import (
    RUNNING_COST_TOKENS,
    Place,
    best_place,
    could_ever_fit,
    has_seat,
    num_needed,
    roomiest,
)
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.state import State
from wire.messages import (
    BlockCopies,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)

MAX_PASSED_OVER = 64
"""How many waiting requests one step leaves to others before it stops looking."""

MIN_CHUNK = 32
"""Tokens below which a prompt is not split for the sake of others."""


@dataclass(slots=True)
class StepPlanner:
    """The plan of the next step of `lane`."""

    state: State
    lane: Lane
    now: float  # seconds, server time
    grown: dict[int, int] = field(default_factory=dict)  # request that decodes -> new block
    chunks: dict[Request, tuple[int, list[int]]] = field(default_factory=dict)  # tokens, new blocks
    joining: list[tuple[Request, int]] = field(default_factory=list)  # request, tokens
    copies: list[BlockCopies] = field(default_factory=list)
    num_listed_tokens: int = 0
    has_preempted: bool = False
    closed: set[str] = field(default_factory=set)  # workers where somebody ahead waits for room
    promised: dict[str, int] = field(default_factory=dict)  # cost of what was left for a worker

    def plan(self) -> SchedulerOutput | None:
        """Hand out the token budget. None if there is nothing to run and nothing to tell."""
        lane = self.lane
        lane.retire()
        self._grow_decoding()
        self._advance_prefilling(is_capped=True)
        if not self.has_preempted:
            if self._bring_back_swapped():
                self._admit_waiting()
            self._advance_prefilling(is_capped=False)
        if not (lane.decode_batch or self.num_listed_tokens or lane.finished or lane.preempted):
            return None
        return self._dispatch()

    # ------------------------------------------------------------ those that run

    def _grow_decoding(self) -> None:
        """All that decode run; those that cross into a new block get it, or somebody yields."""
        for request in self.lane.due_for_a_block():
            while request.status is RequestStatus.DECODING:  # until it yields itself
                if (block := self.lane.kv.grow(request)) is not None:
                    self.grown[request.num] = block
                    break
                self._make_room()

    def _advance_prefilling(self, *, is_capped: bool) -> None:
        """Let running prompts catch up; not capped, they take what nobody else could use."""
        for request in list(self.lane.prefilling):
            done, blocks = self.chunks.get(request, (0, []))
            if any(request is joined for joined, _ in self.joining):
                continue
            missing = request.num_tokens - request.num_computed_tokens - done
            while missing and request.status is RequestStatus.PREFILLING:  # until it yields itself
                n = min(missing, self._budget)
                if is_capped:
                    n = min(n, self._chunk_limit())
                if n == 0:
                    return
                end = request.num_computed_tokens + done + n
                added = self.lane.kv.allocate_slots(request, end)
                if added is not None:
                    self.chunks[request] = done + n, blocks + added
                    self.num_listed_tokens += n
                    self.lane.kv.publish(request, end)
                    break
                if not is_capped:
                    return  # room is left, not made, for what is only a filling
                self._make_room()

    def _make_room(self) -> None:
        """Give blocks back: of requests that only end, else of one that has to yield."""
        if self.lane.release_ending():
            return
        victim = preemption.choose_victim(self.lane, self.state.config, self._is_unplanned)
        assert victim is not None, "a request that is alone always fits"
        self._preempt(victim)
        self.has_preempted = True

    def _is_unplanned(self, request: Request) -> bool:
        """Whether a victim would leave no hole: others may have hit what this step computes."""
        if request in self.chunks:
            return False
        return all(request is not joined for joined, _ in self.joining)

    def _preempt(self, victim: Request) -> None:
        self.grown.pop(victim.num, None)
        lane, totals = self.lane, self.state.totals
        lane.preempt(victim)
        totals.num_preemptions += 1
        if preemption.wants_swap(victim, lane, self.state.config):
            self.copies.append(preemption.swap_out(victim, lane))
            totals.num_swaps += 1
            totals.num_swapped_blocks += len(self.copies[-1].cpu_blocks)
            return
        lane.kv.free(victim)
        self.state.take_back(victim)

    # ------------------------------------------------------------ those that come back

    def _bring_back_swapped(self) -> bool:
        """Swapped requests go on before others of equal urgency begin, most urgent first.

        False if one is left that waits for room: nobody takes it away meanwhile.
        """
        lane, state = self.lane, self.state
        for request in list(lane.swapped):
            if state.policy.preempts:
                ahead = next(state.waiting.walk(), None)
                if ahead is not None and state.policy.may_preempt(ahead, request):
                    return True
            if lane.last_answered_step < request.resume_after:
                return False
            n = min(request.num_tokens - request.num_computed_tokens, self._budget)
            if n <= 0 or not has_seat(request, lane, state.config):
                return False
            copies = preemption.swap_in(request, lane, request.num_computed_tokens + n)
            if copies is None:
                return False
            self.copies.append(copies)
            state.totals.num_swapped_blocks += len(copies.cpu_blocks)
            self._join(request, n)
        return True

    def _take_over_swapped(self) -> None:
        """With nobody waiting, offer to start anew here what is stuck in another's CPU pool."""
        config = self.state.config
        for other in self.state.lanes.values():
            if other is self.lane or not other.swapped:
                continue
            request = other.swapped[0]
            if not self._is_ready(request) or other.kv.pool.num_free >= len(request.cpu_block_ids):
                continue
            if best_place(request, [self.lane], config, {}) is not None:
                other.drop_copies(request)
                self.state.take_back(request)
                return

    # ------------------------------------------------------------ those that wait

    def _admit_waiting(self) -> None:
        state, passed_over = self.state, 0
        for request in state.waiting.walk():
            if self._budget <= 0 or passed_over >= MAX_PASSED_OVER:
                return
            if not (state.policy.preempts or has_seat(request, self.lane, state.config)):
                return
            if not self._consider(request):
                return
            passed_over += request.status is RequestStatus.WAITING
        if not state.waiting:
            self._take_over_swapped()

    def _consider(self, request: Request) -> bool:
        """Admit a waiting request or leave it; False if nobody behind it may pass."""
        lane, state = self.lane, self.state
        if not self._is_ready(request):
            # Its last result is on its way: nobody takes its room on this worker meanwhile.
            return request.worker != lane.worker
        lanes = [one for one in state.lanes.values() if one.worker not in self.closed]
        place = best_place(request, lanes, state.config, self.promised)
        if place is None and lane in lanes and self._make_way_for(request):
            place = best_place(request, [lane], state.config, {})
        if place is None:
            return self._bind(request)
        if self._waits_for_prefix(request, place):
            return True
        if place.lane is lane:
            return self._admit(request, place)
        cost = place.num_missing_tokens + RUNNING_COST_TOKENS
        self.promised[place.lane.worker] = self.promised.get(place.lane.worker, 0) + cost
        return True

    def _admit(self, request: Request, place: Place) -> bool:
        lane, hits = self.lane, place.hits
        hit_tokens = len(hits) * lane.capacity.block_size
        n = min(place.num_missing_tokens, self._budget)
        if self.state.config.enable_chunked_prefill:
            n = min(n, self._chunk_limit())
        elif n < place.num_missing_tokens:
            return False
        if lane.kv.allocate_slots(request, hit_tokens + n, hits) is None:
            return False
        self.state.waiting.remove(request)
        self.state.waiting.served(request.tenant)
        self.state.unbind(request)
        request.num_computed_tokens = hit_tokens
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.sampling.max_tokens, lane.capacity.max_num_tokens
        )
        self._note_start(request, hit_tokens)
        self._join(request, n)
        return True

    def _join(self, request: Request, n: int) -> None:
        self.lane.start(request)
        self.lane.kv.publish(request, request.num_computed_tokens + n)
        self.joining.append((request, n))
        self.num_listed_tokens += n

    def _bind(self, request: Request) -> bool:
        """Let a request that fits nowhere now wait for room on one worker, where nobody passes it.

        One that no registered worker could ever hold waits aside, and holds nobody up.
        """
        lanes = self.state.lanes.values()
        if not any(could_ever_fit(request, lane) for lane in lanes):
            return True
        bound = next((lane for lane in lanes if lane.bound is request), None)
        if bound is None and (bound := roomiest(request, lanes)) is not None:
            bound.bound = request
        if bound is None:
            return False
        self.closed.add(bound.worker)
        return bound is not self.lane

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

    def _make_way_for(self, request: Request) -> bool:
        """Preempt less urgent requests for a waiting one, where the least urgent of all run.

        Only if that is certain to make room and a seat for it. True if it did.
        """
        state, lane = self.state, self.lane
        if not state.policy.preempts or request.is_suspect or not could_ever_fit(request, lane):
            return False
        hits = lane.kv.get_computed_blocks(request)
        needed = num_needed(request, lane, hits, state.config)
        victims: list[Request] = []
        room = lane.kv.pool.num_free
        for victim in reversed(lane.running):
            if not state.policy.may_preempt(request, victim):
                return False
            if not self._is_unplanned(victim):
                continue
            victims.append(victim)
            own = set(victim.block_ids).difference(hits)
            room += sum(lane.kv.pool.num_holders(block) == 1 for block in own)
            if needed <= room:
                break
        if needed > room or not victims or not self._is_least_urgent(victims[0]):
            return False
        for victim in victims:
            self._preempt(victim)
        return True

    def _is_least_urgent(self, victim: Request) -> bool:
        """Whether no other worker runs somebody who should yield before this one."""
        return all(
            lane is self.lane or not len(lane.running) or lane.running[-1].order <= victim.order
            for lane in self.state.lanes.values()
        )

    def _is_ready(self, request: Request) -> bool:
        """Whether all results of an earlier run are in: one of them may end the request."""
        if request.worker is None:
            return True
        lane = self.state.lanes.get(request.worker)
        return lane is None or lane.last_answered_step >= request.resume_after

    def _note_start(self, request: Request, hit_tokens: int) -> None:
        if request.was_started:
            return
        request.was_started = True
        self.state.totals.prefix_cache_queries += request.num_tokens
        self.state.totals.prefix_cache_hits += hit_tokens
        queued = max(0.0, self.now - request.arrival)
        self.state.outputs.started.append(Started(request.num, hit_tokens, queued))

    # ------------------------------------------------------------ budget

    @property
    def _budget(self) -> int:
        """Tokens that the step can still compute."""
        config = self.state.config
        return config.max_num_batched_tokens - len(self.lane.decode_batch) - self.num_listed_tokens

    def _chunk_limit(self) -> int:
        """Most tokens of one prompt, while there are others that it would hold up.

        By default half of what is left: the first in the order gets most, and the next prompts
        start beside it, however long it is.
        """
        config = self.state.config
        is_alone = len(self.lane.running) + len(self.state.waiting) <= 1
        if is_alone or not config.enable_chunked_prefill:
            return config.max_num_batched_tokens
        return config.long_prefill_token_threshold or max(MIN_CHUNK, (self._budget + 1) // 2)

    # ------------------------------------------------------------ out

    def _dispatch(self) -> SchedulerOutput:
        """Turn the plan into a message, and count its tokens as computed."""
        lane, totals = self.lane, self.state.totals
        step_id = lane.next_step
        sampling = list(lane.decode_batch)
        output = SchedulerOutput(
            epoch=self.state.epoch,
            step_id=step_id,
            new_reqs=[_new_request_data(request, n) for request, n in self.joining],
            cached_reqs=self._cached_request_data(),
            num_decodes=len(sampling),
            finished_reqs=lane.finished,
            preempted_reqs=lane.preempted,
            copies=[one for one in self.copies if one.cpu_blocks],
        )
        lane.finished, lane.preempted = [], []
        for tenant, count in lane.decoding_of.items():
            tenant.charge(count)
        listed = [(request, n) for request, (n, _) in self.chunks.items()] + self.joining
        for request, n in listed:
            request.tenant.charge(n)
            request.num_computed_tokens += n
            if request.num_computed_tokens == request.num_tokens:
                sampling.append(request)
                lane.begin_decoding(request, step_id)
        num_copied = sum(len(one.cpu_blocks) for one in output.copies)
        lane.in_flight.append(StepRecord(step_id, sampling, self.num_listed_tokens, num_copied))
        lane.next_step += 1
        totals.num_steps += 1
        totals.num_scheduled_tokens += output.num_decodes + self.num_listed_tokens
        return output

    def _cached_request_data(self) -> CachedRequestData:
        chunks = self.chunks.items()
        return CachedRequestData(
            reqs=[*self.grown, *(request.num for request, _ in chunks)],
            num_scheduled_tokens=[1] * len(self.grown) + [n for _, (n, _) in chunks],
            new_block_ids=[[block] for block in self.grown.values()] + [b for _, (_, b) in chunks],
        )


def _new_request_data(request: Request, num_scheduled_tokens: int) -> NewRequestData:
    return NewRequestData(
        req=request.num,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        block_ids=request.block_ids[:],
        num_computed_tokens=request.num_computed_tokens,
        num_scheduled_tokens=num_scheduled_tokens,
        sampling=request.sampling,
    )
