"""One step, from what the scheduler said to what was sampled.

Brings rows, model, attention and sampler together; owns the order in which they act, and the epoch.
Runs on the device thread and knows no other.

A step is launched, and finished when its tokens are on the host. On a GPU the next one is launched
before that: it takes its input from the tokens on the device, and host and device meet nowhere but
at the copy of the tokens.

    host     launch 7 | launch 8 | finish 7 | launch 9 | finish 8 |
    device            [   step 7   ][   step 8   ][   step 9   ]

Steps with requests that have rules for their tokens (penalties, bans, grammars) need the tokens
before to be on the host, and so wait for them at launch. So do steps with log-probabilities, and
copies of blocks. Decodes run from CUDA graphs in any of these cases, all else eagerly.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from gpu_worker import rehearsal
from gpu_worker.attention.base import PagedBackend, StaticBackend
from gpu_worker.decode_graphs import Capture, DecodeGraphs
from gpu_worker.grammars import GrammarCompiler
from gpu_worker.input_batch import InputBatch, make_batch
from gpu_worker.logprobs import MeasuredLogits, prompt_logprobs
from gpu_worker.model_loader import LoadedModel
from gpu_worker.request_states import Capacity, Receipt, RequestStates
from gpu_worker.sampler import NO_TOKEN, Sampler, sample_in_torch
from gpu_worker.swap import SwapPool
from gpu_worker.transfer import Arrival, CopyOut, copy_out_of
from gpu_worker.work import Work, halves
from wire.messages import (
    HeldRequest,
    ModelRunnerOutput,
    RequestError,
    RequestLogprobs,
    SchedulerOutput,
    token_ids,
)

log = structlog.get_logger()


@dataclass(slots=True)
class Launched:
    """A step that the device computes, or has computed."""

    epoch: int
    step_id: int
    started: float  # seconds, as perf_counter says
    receipt: Receipt
    sampled: Arrival  # tokens (N,), or NO_TOKEN
    logprobs: list[RequestLogprobs]
    copy_us: int
    output: ModelRunnerOutput | None = None  # once it is finished


class ModelRunner:
    """Executes steps, one at a time, in the order they are given."""

    def __init__(
        self,
        model: LoadedModel,
        backend: PagedBackend,
        capacity: Capacity,
        grammars: GrammarCompiler | None = None,
        *,
        capture: Capture | None = None,
        copy_out: CopyOut | None = None,
        sampler: Sampler = sample_in_torch,
    ) -> None:
        """Make cache and rows. With `capture`, warming up makes decode steps repeatable."""
        self.capacity = capacity
        self.epoch = 0  # the highest seen
        self.model = model
        self.backend = backend
        self._grammars = grammars
        self._capture = capture
        self._copy_out = copy_out or copy_out_of(model.device)
        self._sampler = _device_sampler() if isinstance(backend, StaticBackend) else sampler
        backend.alloc_kv(model.kv_shapes, capacity.num_blocks)
        self._swap = SwapPool(backend, len(model.kv_shapes), capacity.num_cpu_blocks)
        self._states = RequestStates(capacity, model.device, grammars)
        self._graphs: DecodeGraphs | None = None
        self._held: list[HeldRequest] = []  # at the last fence, until a step writes
        self._in_flight: deque[Launched] = deque()
        self._finished_at = 0.0  # the last step

    def reset(self) -> None:
        """Hold no request. What the cache holds means nothing any more."""
        self._held = []
        self._in_flight.clear()
        self._states = RequestStates(self.capacity, self.model.device, self._grammars)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Launch a step and finish it; None for one of an epoch that is over."""
        launched = self.launch(step)
        return self.finish(launched) if isinstance(launched, Launched) else launched

    def launch(self, step: SchedulerOutput) -> Launched | ModelRunnerOutput | None:
        """Begin a step; its output if it computes nothing; None for one of an epoch that is over.

        Raises ProtocolError for a step that does not fit, and whatever the model raises. After an
        exception only `reset` may follow, and the end of steps launched before.
        """
        started = time.perf_counter()
        if step.epoch < self.epoch:
            return None
        if step.is_fence:
            self._finish_all()
            self._held = self._states.held() or self._held
        if step.epoch > self.epoch or step.is_fence:
            self._states.forget_all()
            self.epoch = step.epoch
        if step.is_fence:
            return ModelRunnerOutput(step.epoch, step.step_id, held=self._held)
        self._held = []
        copy_us = self._swap.copy(step.copies)
        work = self._states.apply(step)
        self._states.distrust(work.errors)
        sampled, logprobs = self._run(work)
        launched = Launched(
            epoch=step.epoch,
            step_id=step.step_id,
            started=started,
            receipt=self._states.advance(work, sampled),
            sampled=self._copy_out(sampled),
            logprobs=logprobs,
            copy_us=copy_us,
        )
        self._in_flight.append(launched)
        return launched

    def finish(self, launched: Launched) -> ModelRunnerOutput:
        """Wait for a step, and for those launched before it; what it has sampled.

        Raises whatever went wrong on the device.
        """
        while launched.output is None:
            self._finish(self._in_flight.popleft())
        return launched.output

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish(self._in_flight.popleft())

    def _finish(self, launched: Launched) -> None:
        sampled, receipt = launched.sampled.numbers(), launched.receipt
        sampled_ids = [max(token, 0) for token in sampled]
        receipt.record(sampled_ids)
        sick = [place for place, token in enumerate(sampled) if token == NO_TOKEN]
        errors = self._states.errors(receipt, {place: _fault(receipt, place) for place in sick})
        now = time.perf_counter()
        begun = max(launched.started, self._finished_at)
        self._finished_at = now
        launched.output = ModelRunnerOutput(
            epoch=launched.epoch,
            step_id=launched.step_id,
            sampled_token_ids=token_ids(sampled_ids),
            errors=errors,
            device_us=round((now - begun) * 1e6),
            logprobs=launched.logprobs,
            copy_us=launched.copy_us,
        )

    def warm_up(self) -> None:
        """Do what would else be done while a client waits: compile all kernels, capture graphs.

        Leaves no request behind. A model that cannot be captured runs eagerly, with a warning.
        """
        if isinstance(self.backend, StaticBackend):
            for requests in rehearsal.all_kinds(self.capacity):
                self._rehearse(requests)
            self._make_repeatable(self.backend)
        else:
            self._rehearse(rehearsal.small(self.capacity), num_decodes=1)

    def run_largest_steps(self) -> None:
        """Take as much memory as any step can."""
        for requests in rehearsal.largest(self.capacity):
            self._rehearse(requests)

    def _rehearse(self, requests: rehearsal.Requests, num_decodes: int = 0) -> None:
        epoch = self.epoch
        self.execute(SchedulerOutput(epoch, 1, new_reqs=requests))
        for step_id in range(2, 2 + num_decodes):
            self.execute(SchedulerOutput(epoch, step_id, num_decodes=len(requests)))
        self.reset()

    def _make_repeatable(self, backend: StaticBackend) -> None:
        if self._capture is None:
            return
        try:
            self._graphs = DecodeGraphs(self.model, backend, self.capacity, self._capture)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            log.warning("decode_runs_eagerly", reason=str(error).splitlines()[0][:200])

    def _run(self, work: Work) -> tuple[Tensor, list[RequestLogprobs]]:
        if not len(work.rows):
            return torch.zeros(0, dtype=torch.int64, device=self.model.device), []
        logits, of_prompts = self._logits(work)
        states, sampling = self._states, work.of_sampling(work.rows)
        output_index = states.num_known[sampling] - states.num_prompt[sampling]
        measured = MeasuredLogits(states, sampling, output_index, logits)
        if states.logits_processor.rules_of(sampling):
            self._finish_all()  # rules look at the tokens before
            logits = states.logits_processor.apply(logits, sampling)
        sampled = self._sampler(logits, states.sampling, sampling, output_index)
        return sampled, of_prompts + measured.logprobs_of(sampled)

    def _logits(self, work: Work) -> tuple[Tensor, list[RequestLogprobs]]:
        """(N, vocab) of the rows that sample, and what is wanted of their prompts.

        What runs out of memory is run in smaller steps. A request of which a single token does not
        fit gets no logits and fails alone.
        """
        if self._graphs is not None and self._graphs.holds(work):
            return self._graphs.run(self._states, work), []
        try:
            batch = make_batch(self._states, work)
            logits = self._forward(batch)
            if not batch.prompt_targets:
                return logits, []
            logits, of_prompts = logits.tensor_split([work.num_sampling])
            return logits, prompt_logprobs(self._states, batch.prompt_targets, of_prompts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = f"out of memory: {error}"[:200]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        parts = halves(work)
        if parts is not None:
            first, before = self._logits(parts[0])
            first = first.clone()  # what a graph says holds until it is run again
            rest, after = self._logits(parts[1])
            return torch.cat([first, rest]), before + after
        req = self._states.reqs[work.rows[0]]
        log.warning("request_starved", req=req, error=reason)
        self._states.distrust([RequestError(req, reason)])
        shape = work.num_sampling, self.capacity.vocab_size
        return torch.full(shape, torch.nan, device=self.model.device), []

    def _forward(self, batch: InputBatch) -> Tensor:
        self.backend.begin_step(batch.attention)
        return self.model.forward(
            batch.token_ids, batch.positions, batch.logits_indices, self.backend
        )


def _fault(receipt: Receipt, place: int) -> RequestError:
    """What to say of logits that were no numbers."""
    rules = receipt.rules[place] if receipt.rules else None
    if rules is None:
        return RequestError(receipt.reqs[place], "its logits are not finite")
    return RequestError(receipt.reqs[place], rules.fault, "invalid")


def _device_sampler() -> Sampler:
    from gpu_worker.device_sampler import sample  # noqa: PLC0415 - Triton is not everywhere

    return sample


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on the device or on the host."""
    is_named_so = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_named_so or "can't allocate memory" in str(error)
