"""One client's sequences from submission to their end: tokens in, text out, aborted if left.

Owns the life of a request as the gateway sees it: ids, handles, submission, text, and the abort of
whatever was not finished when the caller leaves, for whatever reason. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NoReturn

import structlog

from gateway.detokenizer import Detokenizer, TextOptions
from gateway.errors import ApiError, from_engine, internal, invalid, too_busy, unavailable
from gateway.output_router import OutputRouter, SequenceDelta
from gateway.vocabulary import Vocabulary
from wire.bus import Bus, BusError, BusFullError, QueueFullError, retrying
from wire.codec import WireError
from wire.config import Settings
from wire.messages import (
    AbortRequest,
    EngineCoreRequest,
    FinishedRequest,
    FinishReason,
    SamplingParams,
    StartedRequest,
    token_ids,
)

log = structlog.get_logger()

SUBMIT_PATIENCE_S = 5.0  # Redis may be away for so long before a new request gets a 503
FAREWELL_S = 2.0  # how long `close` tries to get the last aborts out


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate, and how it becomes text."""

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    text: TextOptions = field(default_factory=TextOptions)
    priority: int = 0
    deadline_ms: int | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What is new of one sequence. With a `finish_reason` it is the last of it."""

    index: int
    text: str
    token_ids: Sequence[int]
    num_output_tokens: int  # so far, these included
    started: StartedRequest | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or the stop token id
    num_preemptions: int = 0


class _Sequence:
    """Where one sequence stands."""

    def __init__(self, index: int, req_id: str, handle: int, detokenizer: Detokenizer) -> None:
        self.index = index
        self.req_id = req_id
        self.handle = handle
        self.detokenizer = detokenizer
        self.num_output_tokens = 0
        self.is_open = True


class EngineClient:
    """Generates. One for a gateway; `run` is its background task."""

    def __init__(self, bus: Bus, router: OutputRouter, settings: Settings) -> None:
        self._bus = bus
        self._router = router
        self._settings = settings
        self._aborts: asyncio.Queue[AbortRequest] = asyncio.Queue()

    async def generate(
        self, requests: Sequence[GenerationRequest], vocabulary: Vocabulary, idle_s: float
    ) -> AsyncGenerator[list[SequenceOutput], None]:
        """Queue these together, or none of them, and yield what comes until all have ended.

        Yields an empty list whenever nothing came for `idle_s`. Close it (`aclosing`) to leave
        early: what has not ended is then aborted. Raises ApiError; the others end with it.
        """
        collector = self._router.open(len(requests))
        sequences = [
            _Sequence(index, secrets.token_hex(16), handle, Detokenizer(vocabulary, request.text))
            for index, (handle, request) in enumerate(zip(collector.handles, requests, strict=True))
        ]
        try:
            await self._submit(
                [self._core_request(*pair) for pair in zip(sequences, requests, strict=True)]
            )
            while any(sequence.is_open for sequence in sequences):
                deltas = await collector.get(idle_s)
                outputs = [
                    self._advance(sequences[index], delta)
                    for index, delta in deltas.items()
                    if sequences[index].is_open
                ]
                if outputs or not deltas:
                    yield outputs
        except _NotQueuedError as error:
            for sequence in sequences:
                sequence.is_open = False
            raise error.answer from None
        finally:
            for sequence in sequences:
                self._router.close(sequence.handle)
                if sequence.is_open:
                    self._abort(sequence)

    async def run(self) -> NoReturn:
        """Publish aborts until cancelled, each until Redis has it.

        They are queued here rather than published on the spot, since whoever leaves early is being
        cancelled and cannot wait.
        """
        while True:
            abort = await self._aborts.get()
            try:
                await retrying(partial(self._bus.abort, abort))
            except BusError as error:
                log.error("abort_refused", req_id=abort.req_id, error=str(error))
            finally:
                self._aborts.task_done()

    async def close(self) -> None:
        """Wait a moment for the last aborts; call it before `run` is cancelled."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._aborts.join()
        except TimeoutError:
            log.warning("aborts_unheard", num_aborts=self._aborts.qsize())

    # ------------------------------------------------------------ inside

    def _core_request(self, sequence: _Sequence, request: GenerationRequest) -> EngineCoreRequest:
        return EngineCoreRequest(
            req_id=sequence.req_id,
            gateway=self._router.process,
            handle=sequence.handle,
            prompt_token_ids=token_ids(list(request.prompt_token_ids)),
            sampling=request.sampling,
            priority=request.priority,
            deadline_ms=request.deadline_ms,
            cache_salt=request.cache_salt,
        )

    async def _submit(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queue requests. After a lost reply the same is sent again, which is harmless."""
        try:
            async with asyncio.timeout(SUBMIT_PATIENCE_S):
                await retrying(
                    lambda: self._bus.submit(
                        requests,
                        limit=self._settings.max_queued_requests,
                        retention_s=self._settings.retention_s,
                    ),
                    max_pause_s=0.25,
                )
        except TimeoutError:  # queued or not: nobody knows
            raise unavailable("the server's Redis does not answer; try again") from None
        except QueueFullError as error:
            raise _NotQueuedError(too_busy(f"the queue is full: {error}")) from None
        except BusFullError:
            raise _NotQueuedError(unavailable("the server's Redis is full; try again")) from None
        except WireError as error:
            raise _NotQueuedError(invalid(f"the request is too large: {error}")) from None
        except BusError as error:
            log.error("submit_refused", error=str(error))
            raise _NotQueuedError(internal()) from None

    def _advance(self, sequence: _Sequence, delta: SequenceDelta) -> SequenceOutput:
        """Turn what came into text, and see whether the sequence ends here."""
        new = sequence.detokenizer.push(delta.token_ids)
        sequence.num_output_tokens += new.num_tokens
        output = SequenceOutput(
            index=sequence.index,
            text=new.text,
            token_ids=delta.token_ids[: new.num_tokens],
            num_output_tokens=sequence.num_output_tokens,
            started=delta.started,
        )
        if new.stop is not None:
            if delta.finished is None:
                self._abort(sequence, at_stop_string=True)
            sequence.is_open = False
            return replace(output, finish_reason="stop", stop_reason=new.stop)
        if delta.gap is not None:
            raise internal(delta.gap)
        if delta.finished is not None:
            sequence.is_open = False
            return self._finish(sequence, output, delta.finished)
        return output

    def _finish(
        self, sequence: _Sequence, output: SequenceOutput, finished: FinishedRequest
    ) -> SequenceOutput:
        """Add what the detokenizer held back, and the reason."""
        if finished.finish_reason == "error":
            raise from_engine(finished.error_code, finished.error)
        rest = sequence.detokenizer.finish()
        return replace(
            output,
            text=output.text + rest.text,
            finish_reason="stop" if rest.stop is not None else finished.finish_reason,
            stop_reason=finished.stop_token_id if rest.stop is None else rest.stop,
            num_preemptions=finished.num_preemptions,
        )

    def _abort(self, sequence: _Sequence, *, at_stop_string: bool = False) -> None:
        """Have a sequence ended: at the token that completed a stop string, or where it is."""
        self._router.close(sequence.handle)
        abort = (
            AbortRequest(sequence.req_id, "stop", sequence.num_output_tokens)
            if at_stop_string
            else AbortRequest(sequence.req_id)
        )
        self._aborts.put_nowait(abort)


class _NotQueuedError(Exception):
    """Redis refused the submission: nothing was queued, so there is nothing to abort."""

    def __init__(self, answer: ApiError) -> None:
        super().__init__(str(answer))
        self.answer = answer
