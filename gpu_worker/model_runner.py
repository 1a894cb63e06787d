"""One step, from what the scheduler said to what was sampled.

Brings rows, model, attention and sampler together; owns the order in which they act, and the epoch.
Runs on the device thread and knows no other.
"""

from __future__ import annotations

import time

import structlog
import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata, PagedBackend
from gpu_worker.grammars import GrammarCompiler
from gpu_worker.input_batch import Capacity, InputBatch, RequestStates, Work, halves, make_batch
from gpu_worker.logprobs import MeasuredLogits, prompt_logprobs
from gpu_worker.model_loader import LoadedModel
from gpu_worker.sampler import SamplerOutput, make_metadata, sample
from gpu_worker.swap import SwapPool
from wire.messages import (
    HeldRequest,
    ModelRunnerOutput,
    NewRequestData,
    RequestError,
    RequestLogprobs,
    SamplingParams,
    SchedulerOutput,
    token_ids,
)

log = structlog.get_logger()

_WARM_UP_TOKENS = 64


class ModelRunner:
    """Executes steps, one at a time, in the order they are given."""

    def __init__(
        self,
        model: LoadedModel,
        backend: PagedBackend,
        capacity: Capacity,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.capacity = capacity
        self.epoch = 0  # the highest seen
        self.model = model
        self._backend = backend
        self._grammars = grammars
        backend.alloc_kv(model.kv_shapes, capacity.num_blocks)
        self._swap = SwapPool(backend, len(model.kv_shapes), capacity.num_cpu_blocks)
        self._states = RequestStates(capacity, model.device, grammars)
        self._held: list[HeldRequest] = []  # at the last fence, until a step writes

    def reset(self) -> None:
        """Hold no request. What the cache holds means nothing any more."""
        self._held = []
        self._states = RequestStates(self.capacity, self.model.device, self._grammars)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step; None for one of an epoch that is over.

        Raises ProtocolError for a step that does not fit, and whatever the model raises. After an
        exception only `reset` may follow.
        """
        started = time.perf_counter()
        if step.epoch < self.epoch:
            return None
        if step.is_fence:
            self._held = self._states.held() or self._held
        if step.epoch > self.epoch or step.is_fence:
            self._states.forget_all()
            self.epoch = step.epoch
        if step.is_fence:
            return ModelRunnerOutput(step.epoch, step.step_id, held=self._held)
        self._held = []
        copy_us = self._swap.copy(step.copies)
        work = self._states.apply(step)
        sampled, logprobs = self._run(work)
        sampled_ids = sampled.token_ids.tolist()
        self._states.advance(work, sampled.token_ids, sampled_ids)
        self._states.distrust([*work.errors, *self._errors(work, sampled)])
        return ModelRunnerOutput(
            epoch=step.epoch,
            step_id=step.step_id,
            sampled_token_ids=token_ids(sampled_ids),
            errors=self._states.errors(work.rows[work.samples]),
            device_us=round((time.perf_counter() - started) * 1e6),
            logprobs=logprobs,
            copy_us=copy_us,
        )

    def warm_up(self) -> None:
        """Run a small request, so that no client waits for what the first step alone has to do."""
        room = min(self.capacity.num_blocks * self.capacity.block_size, self.capacity.max_model_len)
        num_tokens = min(_WARM_UP_TOKENS, self.capacity.max_num_batched_tokens, room - 1)
        if num_tokens < 1:
            return
        new = NewRequestData(
            req=0,
            prompt_token_ids=token_ids([0] * num_tokens),
            output_token_ids=token_ids(),
            block_ids=list(range(-(-(num_tokens + 1) // self.capacity.block_size))),
            num_computed_tokens=0,
            num_scheduled_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=2, temperature=1.0, top_p=0.9),
        )
        self.execute(SchedulerOutput(self.epoch, 1, new_reqs=[new]))
        self.execute(SchedulerOutput(self.epoch, 2, num_decodes=1))
        self.reset()

    def _run(self, work: Work) -> tuple[SamplerOutput, list[RequestLogprobs]]:
        if not len(work.rows):
            nothing = torch.zeros(0, dtype=torch.int64, device=self.model.device)
            return SamplerOutput(nothing, nothing.bool()), []
        logits, of_prompts = self._logits(work)
        states, sampling = self._states, work.rows[work.samples]
        output_index = states.num_known[sampling] - states.num_prompt[sampling]
        measured = MeasuredLogits(states, sampling, output_index, logits)
        metadata = make_metadata(states.sampling, sampling, output_index, logits.device)
        sampled = sample(states.logits_processor.apply(logits, sampling), metadata)
        return sampled, of_prompts + measured.logprobs_of(sampled.token_ids)

    def _logits(self, work: Work) -> tuple[Tensor, list[RequestLogprobs]]:
        """(N, vocab) of the rows that sample, and what is wanted of their prompts.

        What runs out of memory is run in smaller steps. A request of which a single token does not
        fit gets no logits and fails alone.
        """
        num_sampling = int(work.samples.sum())
        try:
            batch = make_batch(self._states, work)
            logits = self._forward(batch)
            of_prompts = prompt_logprobs(self._states, batch.prompt_targets, logits[num_sampling:])
            return logits[:num_sampling], of_prompts
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = f"out of memory: {error}"[:200]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        parts = halves(work)
        if parts is not None:
            (first, before), (rest, after) = map(self._logits, parts)
            return torch.cat([first, rest]), before + after
        req = self._states.reqs[work.rows[0]]
        log.warning("request_starved", req=req, error=reason)
        self._states.distrust([RequestError(req, reason)])
        shape = num_sampling, self.capacity.vocab_size
        return torch.full(shape, torch.nan, device=self.model.device), []

    def _forward(self, batch: InputBatch) -> Tensor:
        self._backend.begin_step(
            AttentionMetadata(
                batch.query_start_loc, batch.seq_lens, batch.slot_mapping, batch.block_tables
            )
        )
        return self.model.forward(
            batch.token_ids, batch.positions, batch.logits_indices, self._backend
        )

    def _errors(self, work: Work, sampled: SamplerOutput) -> list[RequestError]:
        if bool(sampled.is_finite.all()):
            return []
        states = self._states
        sick = work.rows[work.samples][~sampled.is_finite.cpu().numpy()]
        errors = []
        for row in sick.tolist():
            fault = states.logits_processor.fault(row)
            if fault is None:
                errors.append(RequestError(states.reqs[row], "its logits are not finite"))
            else:
                errors.append(RequestError(states.reqs[row], fault, "invalid"))
        return errors


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on the device or on the host."""
    is_named_so = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_named_so or "can't allocate memory" in str(error)
