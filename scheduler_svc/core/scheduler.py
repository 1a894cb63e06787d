"""The scheduler: a pure state machine of a few verbs, each of which is atomic.

Owns requests from their admission to their end. How a step is made is the planner's business; how a
verb becomes a message on a stream is the service's. Never reads a clock, awaits or draws a random
number: the same calls give the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from scheduler_svc.core import ending
from scheduler_svc.core.alarms import Alarms, overdue
from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.kv_cache_manager import KVCacheManager
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.outputs import Finished, Outputs, Totals
from scheduler_svc.core.planner import StepPlanner
from scheduler_svc.core.request import Request, RequestStatus, problem_of
from scheduler_svc.core.request_queue import RequestQueue
from scheduler_svc.core.state import Ended, State
from scheduler_svc.core.waiting_line import WaitingLine
from wire.messages import (
    EngineCoreRequest,
    FinishReason,
    HeldRequest,
    ModelRunnerOutput,
    RequestError,
    SchedulerOutput,
    crc_of,
)


class Scheduler:
    """Verbs for requests and steps, and for workers that come and go."""

    def __init__(self, config: SchedulerConfig, epoch: int = 0) -> None:
        self._state = State.new(config, epoch)
        self._alarms = Alarms()

    # ------------------------------------------------------------ workers

    def add_worker(self, worker: str, capacity: WorkerCapacity, last_step: int = 0) -> None:
        """Register a worker with an empty cache; its steps are numbered from `last_step` + 1.

        ValueError if the pool cannot use it: see `check_capacity`.
        """
        state, config = self._state, self.config
        if worker in state.lanes:
            self.totals.num_ignored += 1
            return
        self.check_capacity(capacity)
        if not config.enable_chunked_prefill:
            longest = min(capacity.max_model_len, config.max_num_batched_tokens)
            capacity = WorkerCapacity(
                capacity.num_blocks, capacity.block_size, longest, capacity.num_cpu_blocks
            )
        kv = KVCacheManager(capacity.num_blocks, capacity.block_size, config.enable_prefix_caching)
        state.lanes[worker] = Lane(worker, capacity, kv, last_step)
        state.longest = max(state.longest, capacity.max_num_tokens)
        for request in list(state.waiting):
            ending.refuse_if_too_long(state, request)

    def check_capacity(self, capacity: WorkerCapacity) -> None:
        """Raise ValueError if a worker cut its memory otherwise than those that are here.

        Blocks are named by their content once for the whole pool.
        """
        for lane in self._state.lanes.values():
            if lane.capacity.block_size != capacity.block_size:
                raise ValueError(
                    f"block_size ({capacity.block_size}) must be that of the other workers "
                    f"({lane.capacity.block_size})"
                )

    def adopt(self, worker: str, held: Iterable[HeldRequest]) -> int:
        """Let requests hit what a worker, just added, still holds of them from an earlier epoch.

        Counts only as far as the worker's tokens are those that were committed. Returns the number
        of tokens that need not be computed again.
        """
        lane, num_tokens = self._state.lanes[worker], 0
        for one in held:
            request = self._state.requests.get(one.req)
            if request is None or crc_of(request.prompt_token_ids) != one.prompt_crc:
                continue
            pairs = zip(request.output_token_ids, one.output_token_ids, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            known = min(one.num_computed_tokens, request.num_prompt_tokens + same)
            num_tokens += lane.kv.keep(request, one.block_ids, known)
        return num_tokens

    def remove_worker(self, worker: str, *, is_orderly: bool = False) -> None:
        """A worker is lost, with its cache: all that ran on it waits again, in its old place.

        Unless it left in order, what it ran may be to blame: see `Request.blame`.
        """
        lane = self._state.lanes.pop(worker, None)
        if lane is None:
            self.totals.num_ignored += 1
            return
        self._state.waiting.redeem(worker)
        suspects = [] if is_orderly else list(lane.running)
        for request in lane.abandon():
            request.life.enter("lost", self._state.now)
            self.totals.preemptions["recompute", "worker_lost"] += 1
            if request.preempted_at is None:  # else it was swapped, and waits already
                request.preempted_at = self._state.told_at
            self._state.waiting.push(request)
        for request in suspects:
            request.blame(was_alone=len(suspects) == 1)
            if request.num_lone_losses >= self.config.max_worker_losses:
                lost = f"{request.num_lone_losses} workers were lost while they ran it alone"
                ending.fail(self._state, request, lost, "internal")

    def reset_prefix_cache(self) -> None:
        """Let no later request hit a block that is cached now."""
        for lane in self._state.lanes.values():
            lane.kv.pool.forget_all()
            lane.cpu_pool.forget_all()

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Change limits and policy from the next step on; what runs goes on."""
        state = self._state
        waiting = state.reconfigure(config)
        self._alarms = Alarms()
        for request in state.requests.values():
            request.order = state.order_of(request)
            self._alarms.set(request, config)
        for request in waiting:
            state.waiting.push(request)
        for lane in state.lanes.values():
            lane.running = _sorted_anew(lane.running)
            lane.prefilling = _sorted_anew(lane.prefilling)
            lane.swapped = _sorted_anew(lane.swapped)
            lane.shortage = None

    # ------------------------------------------------------------ requests

    def add_request(self, num: int, request: EngineCoreRequest, arrival: float) -> None:
        """Queue a request. One that could never fit is refused, as an output like any other.

        So is one that makes no sense.
        """
        state = self._state
        if num in state.requests:
            self.totals.num_ignored += 1
            return
        if problem := problem_of(request):
            refusal = Finished(num, 0, "error", error=problem, error_code="invalid")
            state.outputs.finished.append(refusal)
            return
        tenant = state.tenants.join(request.tenant, request.weight)
        added = Request.of(num, request, arrival, tenant)
        added.order = state.order_of(added)
        state.requests[num] = added
        state.waiting.push(added)
        self.totals.num_prompt_tokens += added.num_prompt_tokens
        self._alarms.set(added, self.config)
        if added.num_output_tokens and added.token_ids[-1] in added.stop_ids:
            ending.stop(state, added, added.token_ids[-1])
        elif added.num_output_tokens >= added.sampling.max_tokens:
            ending.finish(state, added, "length")
        else:
            ending.refuse_if_too_long(state, added)

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
        ending.finish(self._state, request, reason, num_output_tokens=num_output_tokens)

    def expire(self, now: float) -> None:
        """End what has waited too long for its first step, or has missed its deadline."""
        self._state.told_at = now
        for num in self._alarms.due(now):
            request = self._state.requests.get(num)
            if request is not None and (error := overdue(request, now, self.config)):
                ending.fail(self._state, request, error, "unavailable")

    def next_wake(self) -> float | None:
        """When `expire` has something to do next, in seconds of server time."""
        return self._alarms.next()

    def take_outputs(self) -> Outputs:
        """All that came of the calls since the last time."""
        outputs, self._state.outputs = self._state.outputs, Outputs()
        return outputs

    # ------------------------------------------------------------ steps

    def schedule(self, worker: str, now: float) -> SchedulerOutput | None:
        """Make the next step of a worker. None if there is nothing to run and nothing to tell.

        `now` is in seconds of server time.
        """
        lane = self._state.lanes.get(worker)
        if lane is None:
            self.totals.num_ignored += 1
            return None
        self._state.told_at = now
        return StepPlanner(self._state, lane, now).plan()

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
        lane.learn(record, output)
        lane.note_beginnings(output.step_id, self._state.now)
        rows: Iterable[tuple[Request, int]] = zip(
            record.sampling, output.sampled_token_ids, strict=True
        )
        worthless: set[int] = set()
        if output.errors or lane.starting_over:
            worthless = lane.take_worthless()
            failed = {error.req: error for error in output.errors if error.req not in worthless}
            rows = [row for row in rows if not self._fail(lane, row[0], failed)]
            worthless |= failed.keys()
            rows = [row for row in rows if row[0].num not in worthless]
        if output.logprobs:
            requests, logprobs = self._state.requests, self._state.outputs.logprobs
            known = [one for one in output.logprobs if one.req in requests]
            logprobs += [one for one in known if one.req not in worthless]
        self._book(rows)
        lane.kv.publish_full(lane.with_full_blocks(output.step_id))
        for request in lane.ending_with(output.step_id):
            ending.finish(self._state, request, "length")
        return True

    def _book(self, rows: Iterable[tuple[Request, int]]) -> None:
        """Append one token each. The hot loop: nothing here that is not needed for every token."""
        out = self._state.outputs
        reqs, starts, tokens = out.reqs, out.starts, out.token_ids
        finished = RequestStatus.FINISHED
        before = len(reqs)
        for request, token in rows:
            if request.status is finished:
                continue
            known = request.token_ids
            reqs.append(request.num)
            starts.append(len(known) - request.num_prompt_tokens)
            tokens.append(token)
            known.append(token)
            if token in request.stop_ids:
                ending.stop(self._state, request, token)
        self.totals.num_generated_tokens += len(reqs) - before

    def _fail(self, lane: Lane, request: Request, errors: dict[int, RequestError]) -> bool:
        """End a request that went wrong in its step; False if it did not.

        If it began with blocks that others had computed, those may be what was wrong: then it
        starts over once, without them.
        """
        error = errors.get(request.num)
        if error is None:
            return False
        if request.status is RequestStatus.FINISHED:
            return True
        if error.code == "internal" and request.has_hits and not request.has_started_over:
            waits = request.status is RequestStatus.WAITING
            lane.start_over(request)
            if not waits:
                self.totals.preemptions["recompute", "mistrust"] += 1
                request.preempted_at = self._state.told_at
                request.life.enter("preempted", self._state.now)
                self._state.waiting.push(request)
        else:
            self.totals.num_corrupted += error.code == "internal"
            ending.fail(self._state, request, error.message, error.code)
        lane.distrust(request)  # at last: an end publishes what is full
        return True

    # ------------------------------------------------------------ to look at

    def note_time(self, now: float) -> None:
        """Say what time it is, in seconds of server time, for the lives of requests only."""
        self._state.now = now

    def take_ended(self) -> list[Ended]:
        """Those that have ended since the last time; the latest only, if they are many."""
        ended = list(self._state.ended)
        self._state.ended.clear()
        return ended

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


def _sorted_anew(queue: RequestQueue) -> RequestQueue:
    anew = RequestQueue()
    for request in queue:
        anew.push(request)
    return anew
