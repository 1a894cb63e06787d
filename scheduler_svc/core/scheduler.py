"""The scheduler: a pure state machine of a few verbs, each of which is atomic.

Owns requests from their admission to their end. How a step is made is the planner's business; how a
verb becomes a message on a stream is the service's. Never reads a clock, awaits or draws a random
number: the same calls give the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.kv_cache_manager import KVCacheManager
from scheduler_svc.core.lane import Lane, StepRecord
from scheduler_svc.core.outputs import Finished, Outputs, Totals
from scheduler_svc.core.planner import StepPlanner
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.request_queue import RequestQueue
from scheduler_svc.core.state import State
from scheduler_svc.core.waiting_line import WaitingLine
from wire.messages import (
    EngineCoreRequest,
    ErrorCode,
    FinishReason,
    ModelRunnerOutput,
    RequestError,
    SchedulerOutput,
)

MIN_RATED_TOKENS = 64
"""Prompt tokens in a step from which on its time says something about the worker's speed."""


class Scheduler:
    """Verbs for requests and steps, and for workers that come and go."""

    def __init__(self, config: SchedulerConfig, epoch: int = 0) -> None:
        self._state = State.new(config, epoch)
        self._longest = 0  # sequence that fitted any worker so far
        self._alarms: list[tuple[float, int]] = []  # heap of (time, request number)

    # ------------------------------------------------------------ workers

    def add_worker(self, worker: str, capacity: WorkerCapacity, last_step: int = 0) -> None:
        """Register a worker with an empty cache; its steps are numbered from `last_step` + 1."""
        config = self.config
        if not config.enable_chunked_prefill:
            longest = min(capacity.max_model_len, config.max_num_batched_tokens)
            capacity = WorkerCapacity(
                capacity.num_blocks, capacity.block_size, longest, capacity.num_cpu_blocks
            )
        kv = KVCacheManager(capacity.num_blocks, capacity.block_size, config.enable_prefix_caching)
        self._state.lanes[worker] = Lane(worker, capacity, kv, last_step)
        self._longest = max(self._longest, capacity.max_num_tokens)
        for request in list(self._state.waiting):
            self._refuse_if_too_long(request)

    def remove_worker(self, worker: str, *, is_orderly: bool = False) -> None:
        """A worker is lost, with its cache: all that ran on it waits again, in its old place.

        Unless it left in order, what it ran may be to blame: see `Request.blame`.
        """
        lane = self._state.lanes.pop(worker, None)
        if lane is None:
            self.totals.num_ignored += 1
            return
        suspects = [] if is_orderly else list(lane.running)
        for request in lane.abandon():
            self.totals.num_preemptions += 1
            self._state.waiting.push(request)
        for request in suspects:
            request.blame(was_alone=len(suspects) == 1)
            if request.num_lone_losses >= self.config.max_worker_losses:
                self._finish(
                    request,
                    "error",
                    error=f"{request.num_lone_losses} workers were lost while they ran it alone",
                    error_code="internal",
                )

    def reset_prefix_cache(self) -> None:
        """Let no later request hit a block that is cached now."""
        for lane in self._state.lanes.values():
            lane.kv.pool.forget_all()
            lane.cpu_pool.forget_all()

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Change limits and policy from the next step on; what runs goes on."""
        state = self._state
        waiting = state.reconfigure(config)
        for request in state.requests.values():
            request.order = self._order_of(request)
        for request in waiting:
            state.waiting.push(request)
        for lane in state.lanes.values():
            lane.running = _sorted_anew(lane.running)
            lane.prefilling = _sorted_anew(lane.prefilling)
            lane.swapped = _sorted_anew(lane.swapped)
            lane.shortage = None

    # ------------------------------------------------------------ requests

    def add_request(self, num: int, request: EngineCoreRequest, arrival: float) -> None:
        """Queue a request. One that could never fit is refused, as an output like any other."""
        state = self._state
        if num in state.requests:
            self.totals.num_ignored += 1
            return
        tenant = state.tenants.join(request.tenant, request.weight)
        added = Request.of(num, request, arrival, tenant)
        added.order = self._order_of(added)
        state.requests[num] = added
        state.waiting.push(added)
        self.totals.num_prompt_tokens += added.num_prompt_tokens
        self._set_alarms(added)
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
        request = self._state.requests.get(num)
        if request is None:
            self.totals.num_ignored += 1
            return
        self._finish(request, reason, num_output_tokens=num_output_tokens)

    def expire(self, now: float) -> None:
        """End what has waited too long for its first step, or has missed its deadline."""
        while self._alarms and self._alarms[0][0] <= now:
            _, num = heappop(self._alarms)
            request = self._state.requests.get(num)
            if request is None:
                continue
            if request.deadline is not None and request.deadline <= now:
                self._finish(
                    request, "error", error="the deadline has passed", error_code="unavailable"
                )
            elif not request.was_started and self.config.queue_timeout_s:
                waited = f"{self.config.queue_timeout_s:g} s"
                self._finish(
                    request,
                    "error",
                    error=f"no worker had room for it within {waited}",
                    error_code="unavailable",
                )

    def next_wake(self) -> float | None:
        """When `expire` has something to do next, in seconds of server time."""
        return self._alarms[0][0] if self._alarms else None

    def take_outputs(self) -> Outputs:
        """All that came of the calls since the last time."""
        outputs, self._state.outputs = self._state.outputs, Outputs()
        return outputs

    # ------------------------------------------------------------ steps

    def schedule(self, worker: str, now: float) -> SchedulerOutput | None:
        """Make the next step of a worker. None if there is nothing to run and nothing to tell.

        `now` is in seconds of server time.
        """
        return StepPlanner(self._state, self._state.lanes[worker], now).plan()

    def update_from_output(self, worker: str, output: ModelRunnerOutput) -> bool:
        """Book what a step sampled; what ended meanwhile is dropped.

        False if the worker can no longer be trusted (the step failed, or its result does not fit
        it): the caller then removes the worker. A result that nobody waits for is ignored.
        """
        lane = self._state.lanes.get(worker)
        if (
            lane is None
            or output.epoch != self.epoch
            or not lane.in_flight
            or output.step_id != lane.in_flight[0].step_id
        ):
            self.totals.num_ignored += 1
            return True
        record = lane.in_flight[0]
        if output.failed is not None or len(output.sampled_token_ids) != len(record.sampling):
            return False
        lane.in_flight.popleft()
        lane.last_answered_step = output.step_id
        _note_rates(lane, record, output)
        rows: Iterable[tuple[Request, int]] = zip(
            record.sampling, output.sampled_token_ids, strict=True
        )
        if output.errors:
            failed = {error.req: error for error in output.errors}
            rows = [(request, token) for request, token in rows if not self._fail(request, failed)]
        if output.logprobs:
            requests, logprobs = self._state.requests, self._state.outputs.logprobs
            logprobs += [one for one in output.logprobs if one.req in requests]
        self._book(lane, rows)
        return True

    def _book(self, lane: Lane, rows: Iterable[tuple[Request, int]]) -> None:
        """Append one token each. The hot loop: nothing here that is not needed for every token."""
        out, size = self._state.outputs, lane.capacity.block_size
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

    def _fail(self, request: Request, errors: dict[int, RequestError]) -> bool:
        error = errors.get(request.num)
        if error is None:
            return False
        if request.status is not RequestStatus.FINISHED:
            self._finish(request, "error", error=error.message, error_code=error.code)
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
        state = self._state
        if request.status is RequestStatus.WAITING:
            state.waiting.remove(request)
            state.unbind(request)
        else:
            assert request.worker is not None
            state.lanes[request.worker].finish(request)
        request.status = RequestStatus.FINISHED
        del state.requests[request.num]
        request.tenant.num_requests -= 1
        known = request.num_output_tokens
        counted = known if num_output_tokens is None else min(num_output_tokens, known)
        if reason in {"stop", "length"}:
            request.tenant.note_output(counted)
        state.outputs.finished.append(
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

    # ------------------------------------------------------------ order and time

    def _order_of(self, request: Request) -> tuple[int, int, int]:
        state = self._state
        num_cached = 0
        if state.config.policy == "sjf":
            num_cached = max(
                (
                    len(lane.kv.get_computed_blocks(request)) * lane.capacity.block_size
                    for lane in state.lanes.values()
                ),
                default=0,
            )
        return 0 if request.is_system else 1, state.policy.rank(request, num_cached), request.num

    def _set_alarms(self, request: Request) -> None:
        if request.deadline is not None and self.config.deadline_action != "ignore":
            heappush(self._alarms, (request.deadline, request.num))
        if self.config.queue_timeout_s:
            heappush(self._alarms, (request.arrival + self.config.queue_timeout_s, request.num))

    # ------------------------------------------------------------ to look at

    @property
    def config(self) -> SchedulerConfig:
        """The configuration in force."""
        return self._state.config

    @property
    def epoch(self) -> int:
        """Epoch of every step that this scheduler makes."""
        return self._state.epoch

    @property
    def totals(self) -> Totals:
        """Counters since this scheduler took the lead."""
        return self._state.totals

    @property
    def waiting(self) -> WaitingLine:
        """Those that wait. Not to be changed."""
        return self._state.waiting

    @property
    def requests(self) -> dict[int, Request]:
        """All requests that have not ended. Not to be changed."""
        return self._state.requests

    @property
    def lanes(self) -> dict[str, Lane]:
        """All registered workers. Not to be changed."""
        return self._state.lanes

    @property
    def served(self) -> dict[str, float]:
        """The tenants' counters."""
        return self._state.tenants.served()

    def take_served(self) -> dict[str, float]:
        """The counters of those tenants that were served since the last time."""
        return self._state.tenants.take_changes()

    def restore_served(self, served: dict[str, float]) -> None:
        """Go on from tenants' counters that an earlier leader left."""
        self._state.tenants.restore(served)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each request is in one place and each block accounted for."""
        state = self._state
        waiting = list(state.waiting)
        assert len(waiting) == len(state.waiting)
        assert all(r.status is RequestStatus.WAITING for r in waiting)
        assert not any(r.block_ids or r.cpu_block_ids for r in waiting), "it waits and holds blocks"
        placed = [r.num for r in waiting]
        for lane in state.lanes.values():
            lane.check_integrity()
            assert lane.bound is None or lane.bound in waiting
            placed += [r.num for r in [*lane.running, *lane.swapped]] + list(lane.ending)
        assert sorted(placed) == sorted(state.requests), "a request is in no place, or in two"


def _note_rates(lane: Lane, record: StepRecord, output: ModelRunnerOutput) -> None:
    computing_us = output.device_us - output.copy_us
    if record.num_prompt_tokens >= MIN_RATED_TOKENS and computing_us > 0:
        lane.rates.note_prefill(record.num_prompt_tokens, computing_us / 1e6)
    if record.num_copied_blocks and output.copy_us > 0:
        lane.rates.note_copies(record.num_copied_blocks, output.copy_us / 1e6)


def _sorted_anew(queue: RequestQueue) -> RequestQueue:
    anew = RequestQueue()
    for request in queue:
        anew.push(request)
    return anew
