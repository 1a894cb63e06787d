"""The plan of one step of one worker, while it is made.

Owns what the step computes so far, what is left of its budget, and how it becomes a message. Which
request gets how much is decided in `planner` and `admission`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core import preemption
from scheduler_svc.core.lane import Lane, StepRecord
from scheduler_svc.core.outputs import PreemptionReason
from scheduler_svc.core.request import Request
from scheduler_svc.core.state import State
from wire.messages import BlockCopies, CachedRequestData, NewRequestData, SchedulerOutput

MIN_CHUNK = 32
"""Tokens below which a prompt is not split for the sake of others."""


@dataclass(slots=True)
class Plan:
    """What the next step of `lane` computes beside its decode batch."""

    state: State
    lane: Lane
    now: float  # seconds, server time
    grown: dict[int, int] = field(default_factory=dict)  # request that decodes -> new block
    chunks: dict[Request, tuple[int, list[int]]] = field(default_factory=dict)  # tokens, new blocks
    joining: dict[Request, int] = field(default_factory=dict)  # request -> tokens
    copies: list[BlockCopies] = field(default_factory=list)
    num_listed_tokens: int = 0  # of `chunks` and `joining`
    has_preempted: bool = False  # to make room for what runs

    # ------------------------------------------------------------ budget

    @property
    def budget(self) -> int:
        """Tokens that the step can still compute."""
        config = self.state.config
        return config.max_num_batched_tokens - len(self.lane.decode_batch) - self.num_listed_tokens

    def chunk_limit(self) -> int:
        """Most tokens of one prompt, while there are others that it would hold up.

        By default half of what is left: the first in the order gets most, and the next prompts
        start beside it, however long it is.
        """
        config = self.state.config
        is_alone = len(self.lane.running) + len(self.state.waiting) <= 1
        if is_alone or not config.enable_chunked_prefill:
            return config.max_num_batched_tokens
        return config.long_prefill_token_threshold or max(MIN_CHUNK, (self.budget + 1) // 2)

    # ------------------------------------------------------------ changes

    def num_planned_tokens(self, request: Request) -> int:
        """Tokens of a prompt that the step computes so far."""
        return self.joining.get(request) or self.chunks.get(request, (0, []))[0]

    def advance(self, request: Request, n: int, blocks: list[int]) -> None:
        """Let a running prompt catch up by `n` more tokens, for which it got `blocks`."""
        if request in self.joining:
            self.joining[request] += n
        else:
            done, held = self.chunks.get(request, (0, []))
            self.chunks[request] = done + n, held + blocks
        self.num_listed_tokens += n
        end = request.num_computed_tokens + self.num_planned_tokens(request)
        self.lane.kv.publish(request, end)

    def join(self, request: Request, n: int) -> None:
        """Let a request run from now on that has its blocks, `n` tokens in this step."""
        if request.preempted_at is not None:
            request.run_again(self.now)
        self.lane.start(request)
        request.life.enter("prefill", self.now)
        self.lane.kv.publish(request, request.num_computed_tokens + n)
        self.joining[request] = n
        self.num_listed_tokens += n

    def is_unplanned(self, request: Request) -> bool:
        """Whether a victim would leave no hole: others may have hit what this step computes."""
        return request not in self.chunks and request not in self.joining

    def preempt(self, victim: Request, reason: PreemptionReason) -> None:
        """Take a running request's place: its blocks go to the CPU pool, or back to the pool."""
        self.grown.pop(victim.num, None)
        lane, totals = self.lane, self.state.totals
        lane.preempt(victim)
        victim.preempted_at = self.now
        if preemption.wants_swap(victim, lane, self.state.config):
            totals.preemptions["swap", reason] += 1
            self.copies.append(preemption.swap_out(victim, lane))
            victim.life.enter("swapped", self.now)
            totals.num_swaps += 1
            totals.num_swapped_blocks += len(self.copies[-1].cpu_blocks)
            return
        totals.preemptions["recompute", reason] += 1
        lane.kv.free(victim)
        victim.life.enter("preempted", self.now)
        self.state.waiting.push(victim)

    # ------------------------------------------------------------ out

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run and nothing to tell."""
        lane = self.lane
        return not (lane.decode_batch or self.num_listed_tokens or lane.finished or lane.preempted)

    def dispatch(self) -> SchedulerOutput:
        """Turn the plan into a message, and count its tokens as computed."""
        lane, totals = self.lane, self.state.totals
        step_id = lane.next_step
        sampling = list(lane.decode_batch)
        output = SchedulerOutput(
            epoch=self.state.epoch,
            step_id=step_id,
            new_reqs=[_new_request_data(request, n) for request, n in self.joining.items()],
            cached_reqs=self._cached_request_data(),
            num_decodes=len(sampling),
            finished_reqs=lane.finished,
            preempted_reqs=lane.preempted,
            copies=[one for one in self.copies if one.cpu_blocks],
            config_version=self.state.config.version,
        )
        lane.finished, lane.preempted = [], []
        for tenant, count in lane.decoding_of.items():
            self.state.charge(tenant, count)
        listed = {request: n for request, (n, _) in self.chunks.items()} | self.joining
        for request, n in listed.items():
            self.state.charge(request.tenant, n)
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
        traceparent=request.traceparent,
    )
