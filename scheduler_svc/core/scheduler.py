"""The scheduler: a pure state machine. Decides which tokens of which request each step computes.

Owns all requests, the global waiting queue and a lane per worker. Never reads a clock, awaits or
draws a random number: the same calls give the same decisions.

There are no phases. A request has computed tokens and known tokens, and a step lets the first catch
up with the second; a request that decodes is just one that is a single token behind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.kv_cache_manager import KVCacheManager
from scheduler_svc.core.lane import Lane, StepRecord
from scheduler_svc.core.outputs import Finished, Outputs, Started, Totals
from scheduler_svc.core.placement import RUNNING_COST_TOKENS, Place, best_place, could_ever_fit
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.request_queue import RequestQueue
from wire.messages import (
    CachedRequestData,
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)

MAX_PASSED_OVER = 64
"""How many waiting requests one call leaves for better workers before it stops looking."""


@dataclass(slots=True)
class _Plan:
    """One step in the making."""

    step_id: int
    grown: dict[int, int] = field(default_factory=dict)  # request that decodes -> new block
    chunks: dict[Request, tuple[int, list[int]]] = field(default_factory=dict)  # tokens, new blocks
    admitted: list[tuple[Request, int]] = field(default_factory=list)  # request, tokens
    num_listed_tokens: int = 0
    has_preempted: bool = False


class Scheduler:
    """Four verbs for requests and steps, and two for workers that come and go."""

    def __init__(self, config: SchedulerConfig, epoch: int = 0) -> None:
        self.config = config
        self.epoch = epoch
        self.waiting = RequestQueue()
        self.totals = Totals()
        self._requests: dict[int, Request] = {}
        self._lanes: dict[str, Lane] = {}
        self._outputs = Outputs()
        self._longest = 0  # sequence that fitted any worker so far

    # ------------------------------------------------------------ workers

    def add_worker(self, worker: str, capacity: WorkerCapacity, last_step: int = 0) -> None:
        """Register a worker with an empty cache; its steps are numbered from `last_step` + 1."""
        if not self.config.enable_chunked_prefill:
            longest = min(capacity.max_model_len, self.config.max_num_batched_tokens)
            capacity = WorkerCapacity(capacity.num_blocks, capacity.block_size, longest)
        kv = KVCacheManager(
            capacity.num_blocks, capacity.block_size, self.config.enable_prefix_caching
        )
        self._lanes[worker] = Lane(worker, capacity, kv, last_step)
        self._longest = max(self._longest, capacity.max_num_tokens)
        for request in list(self.waiting):
            self._refuse_if_too_long(request)

    def remove_worker(self, worker: str) -> None:
        """A worker is lost, with its cache: all that ran on it waits again, in its old place."""
        lane = self._lanes.pop(worker, None)
        if lane is None:
            self.totals.num_ignored += 1
            return
        for request in lane.abandon():
            self._count_preemption(request)
            self.waiting.push(request)

    # ------------------------------------------------------------ requests

    def add_request(self, num: int, request: EngineCoreRequest, arrival: float) -> None:
        """Queue a request. One that could never fit is refused, as an output like any other."""
        if num in self._requests:
            self.totals.num_ignored += 1
            return
        added = Request.of(num, request, arrival)
        self._requests[num] = added
        self.waiting.push(added)
        self.totals.num_prompt_tokens += added.num_prompt_tokens
        if added.num_output_tokens and added.token_ids[-1] in added.stop_ids:
            self._stop(added, added.token_ids[-1])
        elif added.num_output_tokens >= added.sampling.max_tokens:
            self._finish(added, "length")
        else:
            self._refuse_if_too_long(added)

    def abort_request(
        self, num: int, reason: FinishReason = "abort", num_output_tokens: int | None = None
    ) -> None:
        """End a request wherever it is; one that has ended already is ignored.

        `num_output_tokens`: how much of its output counts, if not all.
        """
        request = self._requests.get(num)
        if request is None:
            self.totals.num_ignored += 1
            return
        self._finish(request, reason, num_output_tokens=num_output_tokens)

    def take_outputs(self) -> Outputs:
        """All that came of the calls since the last time."""
        outputs, self._outputs = self._outputs, Outputs()
        return outputs

    # ------------------------------------------------------------ one step

    def schedule(self, worker: str, now: float) -> SchedulerOutput | None:
        """Hand out the token budget of one step: first to those running, then to those waiting.

        None if there is nothing to run and nothing to tell. `now` is in seconds of server time.
        """
        lane = self._lanes[worker]
        lane.retire()
        plan = _Plan(lane.next_step)
        self._grow_decoding(lane, plan)
        self._schedule_prefilling(lane, plan)
        if not plan.has_preempted:
            self._schedule_waiting(lane, plan, now)
        if not (lane.decode_batch or plan.num_listed_tokens or lane.finished or lane.preempted):
            return None
        return self._dispatch(lane, plan)

    def _grow_decoding(self, lane: Lane, plan: _Plan) -> None:
        """All that decode run; those that cross into a new block get it, or somebody yields."""
        for request in lane.due_for_a_block():
            while request.status is RequestStatus.DECODING:  # until it yields itself
                if (block := lane.kv.grow(request)) is not None:
                    plan.grown[request.num] = block
                    break
                self._make_room(lane, plan)

    def _schedule_prefilling(self, lane: Lane, plan: _Plan) -> None:
        for request in list(lane.prefilling):
            missing = request.num_tokens - request.num_computed_tokens
            while request.status is RequestStatus.PREFILLING:  # until it yields itself
                n = min(missing, self._budget(lane, plan), self._chunk_limit(lane))
                if n == 0:
                    return
                computed = request.num_computed_tokens + n
                if (blocks := lane.kv.allocate_slots(request, computed)) is not None:
                    plan.chunks[request] = n, blocks
                    plan.num_listed_tokens += n
                    lane.kv.publish(request, computed)
                    break
                self._make_room(lane, plan)

    def _schedule_waiting(self, lane: Lane, plan: _Plan, now: float) -> None:
        index = passed_over = 0
        promised: dict[str, int] = {}
        while index < len(self.waiting) and passed_over < MAX_PASSED_OVER:
            if self._budget(lane, plan) == 0 or len(lane.running) >= self.config.max_num_seqs:
                return
            request = self.waiting[index]
            if not self._is_ready(request):
                if request.worker == lane.worker:
                    return  # its last result is on its way: nobody takes its room meanwhile
            elif (place := self._best_place(request, promised)) is None:
                if any(could_ever_fit(request, other) for other in self._lanes.values()):
                    return
            elif place.lane is lane:
                if not self._admit(request, place, plan, now):
                    return
                continue
            else:
                cost = place.num_missing_tokens + RUNNING_COST_TOKENS
                promised[place.lane.worker] = promised.get(place.lane.worker, 0) + cost
            index += 1
            passed_over += 1

    def _admit(self, request: Request, place: Place, plan: _Plan, now: float) -> bool:
        lane, hits = place.lane, place.hits
        hit_tokens = len(hits) * lane.capacity.block_size
        missing = place.num_missing_tokens
        n = min(missing, self._budget(lane, plan))
        if self.config.enable_chunked_prefill:
            n = min(n, self._chunk_limit(lane))
        elif n < missing:
            return False
        if lane.kv.allocate_slots(request, hit_tokens + n, hits) is None:
            return False
        self.waiting.remove(request)
        request.num_computed_tokens = hit_tokens
        request.max_num_tokens = min(
            request.num_prompt_tokens + request.sampling.max_tokens, lane.capacity.max_num_tokens
        )
        lane.start(request)
        lane.kv.publish(request, hit_tokens + n)
        plan.admitted.append((request, n))
        plan.num_listed_tokens += n
        self._note_start(request, hit_tokens, now)
        return True

    # ------------------------------------------------------------ room

    def _make_room(self, lane: Lane, plan: _Plan) -> None:
        """Give blocks back: of requests that only end, else of the least urgent that runs.

        Whoever is first in the order is never the victim unless alone, and alone it fits: so
        somebody always makes progress.
        """
        if lane.release_ending():
            return
        victim = lane.running.last()
        plan.has_preempted = True
        plan.grown.pop(victim.num, None)
        n, _ = plan.chunks.pop(victim, (0, ()))
        plan.num_listed_tokens -= n
        lane.preempt(victim)
        self._count_preemption(victim)
        self.waiting.push(victim)

    def _budget(self, lane: Lane, plan: _Plan) -> int:
        return self.config.max_num_batched_tokens - len(lane.decode_batch) - plan.num_listed_tokens

    def _chunk_limit(self, lane: Lane) -> int:
        """Most tokens of one prompt in a step, when there are others to be held up by it."""
        threshold = self.config.long_prefill_token_threshold
        is_alone = len(lane.running) + len(self.waiting) <= 1
        if threshold == 0 or is_alone or not self.config.enable_chunked_prefill:
            return self.config.max_num_batched_tokens
        return threshold

    def _is_ready(self, request: Request) -> bool:
        """Whether all results of an earlier run are in: one of them may end the request."""
        if request.worker is None:
            return True
        lane = self._lanes.get(request.worker)
        return lane is None or lane.last_answered_step >= request.resume_after

    def _best_place(self, request: Request, promised: dict[str, int]) -> Place | None:
        return best_place(
            request,
            self._lanes.values(),
            self.config.max_num_seqs,
            self.config.reserve_full_prompt,
            promised,
        )

    # ------------------------------------------------------------ out and back

    def _dispatch(self, lane: Lane, plan: _Plan) -> SchedulerOutput:
        """Turn the plan into a message, and count its tokens as computed."""
        sampling = list(lane.decode_batch)
        new = [_new_request_data(request, n) for request, n in plan.admitted]
        output = SchedulerOutput(
            epoch=self.epoch,
            step_id=plan.step_id,
            new_reqs=new,
            cached_reqs=_cached_request_data(plan),
            num_decodes=len(sampling),
            finished_reqs=lane.finished,
            preempted_reqs=lane.preempted,
        )
        lane.finished, lane.preempted = [], []
        listed = [(request, n) for request, (n, _) in plan.chunks.items()] + plan.admitted
        for request, n in listed:
            request.num_computed_tokens += n
            if request.num_computed_tokens == request.num_tokens:
                sampling.append(request)
                lane.begin_decoding(request, plan.step_id)
        num_tokens = output.num_decodes + plan.num_listed_tokens
        lane.in_flight.append(StepRecord(plan.step_id, sampling))
        lane.next_step += 1
        self.totals.num_steps += 1
        self.totals.num_scheduled_tokens += num_tokens
        return output

    def update_from_output(self, worker: str, output: ModelRunnerOutput) -> bool:
        """Book what a step sampled; what ended meanwhile is dropped.

        False if the worker can no longer be trusted (the step failed, or its result does not fit
        it): the caller then removes the worker. A result that nobody waits for is ignored.
        """
        lane = self._lanes.get(worker)
        if (
            lane is None
            or output.epoch != self.epoch
            or not lane.in_flight
            or output.step_id != lane.in_flight[0].step_id
        ):
            self.totals.num_ignored += 1
            return True
        sampling = lane.in_flight[0].sampling
        if output.failed is not None or len(output.sampled_token_ids) != len(sampling):
            return False
        lane.in_flight.popleft()
        lane.last_answered_step = output.step_id
        failed = {error.req: error.message for error in output.errors}
        rows: Iterable[tuple[Request, int]] = zip(sampling, output.sampled_token_ids, strict=True)
        if failed:
            rows = [(request, token) for request, token in rows if not self._fail(request, failed)]
        self._book(lane, rows)
        return True

    def _book(self, lane: Lane, rows: Iterable[tuple[Request, int]]) -> None:
        """Append one token each. The hot loop: nothing here that is not needed for every token."""
        out, size = self._outputs, lane.capacity.block_size
        reqs, starts, tokens = out.reqs, out.starts, out.token_ids
        finished = RequestStatus.FINISHED
        before = len(reqs)
        for request, token in rows:
            if request.status is finished:
                continue
            known = request.token_ids
            known.append(token)
            num_tokens = len(known)
            reqs.append(request.num)
            starts.append(num_tokens - request.num_prompt_tokens - 1)
            tokens.append(token)
            if (num_tokens - 1) % size == 0 and request.block_ids:
                lane.kv.publish(request, num_tokens - 1)
            if token in request.stop_ids:
                self._stop(request, token)
            elif num_tokens >= request.max_num_tokens:
                self._finish(request, "length")
        self.totals.num_generated_tokens += len(reqs) - before

    # ------------------------------------------------------------ ends

    def _refuse_if_too_long(self, request: Request) -> None:
        """End what no worker could hold alone. Before the first worker came, nobody knows."""
        if 0 < self._longest <= request.num_tokens:
            self._finish(
                request,
                "error",
                error=f"the prompt has {request.num_tokens} tokens; the largest worker has room "
                f"for {self._longest}, and one of them is output",
                error_code="invalid",
            )

    def _fail(self, request: Request, errors: dict[int, str]) -> bool:
        message = errors.get(request.num)
        if message is None:
            return False
        if request.status is not RequestStatus.FINISHED:
            self._finish(request, "error", error=message, error_code="internal")
        return True

    def _stop(self, request: Request, token: int) -> None:
        own = token in request.sampling.stop_token_ids
        self._finish(request, "stop", stop_token_id=token if own else None)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        num_output_tokens: int | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
        error_code: ErrorCode | None = None,
    ) -> None:
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        else:
            assert request.worker is not None
            self._lanes[request.worker].finish(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.num]
        known = request.num_output_tokens
        counted = known if num_output_tokens is None else min(num_output_tokens, known)
        self._outputs.finished.append(
            Finished(
                req=request.num,
                num_output_tokens=counted,
                finish_reason=reason,
                stop_token_id=stop_token_id,
                error=error,
                error_code=error_code,
                num_preemptions=request.num_preemptions,
            )
        )

    # ------------------------------------------------------------ figures

    def _count_preemption(self, request: Request) -> None:
        self.totals.num_preemptions += 1
        self.totals.num_recomputed_tokens += min(request.num_computed_tokens, request.num_tokens)

    def _note_start(self, request: Request, hit_tokens: int, now: float) -> None:
        if request.was_started:
            return
        request.was_started = True
        request.num_cached_tokens = hit_tokens
        self.totals.prefix_cache_queries += request.num_tokens
        self.totals.prefix_cache_hits += hit_tokens
        queued = max(0.0, now - request.arrival)
        self._outputs.started.append(Started(request.num, hit_tokens, queued))

    @property
    def requests(self) -> dict[int, Request]:
        """All requests that have not ended. Not to be changed."""
        return self._requests

    @property
    def lanes(self) -> dict[str, Lane]:
        """All registered workers. Not to be changed."""
        return self._lanes

    def check_integrity(self) -> None:
        """Raise AssertionError unless each request is in one place and each block accounted for."""
        placed = [r.num for r in self.waiting]
        assert all(r.status is RequestStatus.WAITING and not r.block_ids for r in self.waiting)
        assert placed == sorted(placed), "the waiting queue is out of order"
        for lane in self._lanes.values():
            lane.check_integrity()
            assert len(lane.running) <= self.config.max_num_seqs
            placed += [r.num for r in lane.running] + list(lane.ending)
        assert sorted(placed) == sorted(self._requests), "a request is in no place, or in two"


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


def _cached_request_data(plan: _Plan) -> CachedRequestData:
    chunks = plan.chunks.items()
    return CachedRequestData(
        reqs=[*plan.grown, *(request.num for request, _ in chunks)],
        num_scheduled_tokens=[1] * len(plan.grown) + [n for _, (n, _) in chunks],
        new_block_ids=[[block] for block in plan.grown.values()] + [b for _, (_, b) in chunks],
    )
