"""PageStream's scheduler core as an `Engine` of the traces."""

from __future__ import annotations

from collections.abc import Callable

from bench.scheduler_traces import BLOCK_SIZE, END, Arrival, Decision, Trace
from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from wire.messages import (
    EngineCoreRequest,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    token_ids,
)

WORKER = "w0"


def new_request(arrival: Arrival) -> EngineCoreRequest:
    """What a gateway would send."""
    return EngineCoreRequest(
        req_id=str(arrival.num),
        gateway="g.0",
        handle=arrival.num,
        prompt_token_ids=arrival.prompt,
        sampling=SamplingParams(max_tokens=arrival.max_tokens, eos_token_ids=[END]),
        tenant=arrival.tenant,
    )


class OurEngine:
    """One core with one worker."""

    def __init__(self, trace: Trace) -> None:
        config = SchedulerConfig(
            max_num_seqs=trace.max_num_seqs,
            max_num_batched_tokens=trace.max_num_batched_tokens,
            long_prefill_token_threshold=trace.long_prefill_token_threshold,
        )
        capacity = WorkerCapacity(trace.num_blocks, BLOCK_SIZE, trace.max_model_len)
        self.scheduler = Scheduler(config, epoch=1)
        self.scheduler.add_worker(WORKER, capacity)
        self._now = 0.0

    def add(self, arrival: Arrival) -> None:
        self.scheduler.add_request(arrival.num, new_request(arrival), self._now)

    def schedule(self) -> SchedulerOutput | None:
        self._now += 0.01
        return self.scheduler.schedule(WORKER, self._now)

    def decision(self, step: SchedulerOutput) -> Decision:
        sampling = self.scheduler.lanes[WORKER].in_flight[-1].sampling
        tokens = {request.num: 1 for request in sampling[: step.num_decodes]}
        cached = step.cached_reqs
        tokens.update(zip(cached.reqs, cached.num_scheduled_tokens, strict=True))
        tokens.update((new.req, new.num_scheduled_tokens) for new in step.new_reqs)
        started = {new.req: new.num_computed_tokens for new in step.new_reqs}
        return Decision(tokens, started, sorted(step.preempted_reqs))

    def answer(self, step: SchedulerOutput, tokens: Callable[[int], int]) -> ModelRunnerOutput:
        sampling = self.scheduler.lanes[WORKER].in_flight[-1].sampling
        sampled = token_ids([tokens(request.num) for request in sampling])
        return ModelRunnerOutput(step.epoch, step.step_id, sampled, device_us=1)

    def update(self, step: SchedulerOutput, answer: ModelRunnerOutput) -> None:
        assert self.scheduler.update_from_output(WORKER, answer)
        self.scheduler.take_outputs()

    def num_preemptions(self) -> int:
        return self.scheduler.totals.num_preemptions
