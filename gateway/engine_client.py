"""One client's sequences from submission to their end, and let go of if they are left.

Owns the life of an answer as the gateway sees it: submission, outputs, and what becomes of what was
not finished when the caller leaves, for whatever reason: it is aborted, unless its client may come
back for it. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import structlog

from gateway.errors import ApiError, internal, invalid, over_quota, too_busy, unavailable
from gateway.output_router import NO_HANDLE, Collector, Followed, OutputRouter
from gateway.patience import patiently
from gateway.recovery import Recovery
from gateway.sequences import Reading, ReadSequence, SequenceOutput
from gateway.service_rate import ServiceRate
from wire.answer_record import AnswerRecord
from wire.api_keys import PLAIN, Terms
from wire.bus import Bus, BusError, BusFullError, ClaimedError, QueueFullError, retrying
from wire.codec import WireError
from wire.config import Settings
from wire.messages import (
    AbortRequest,
    EngineCoreRequest,
    ResumeRequest,
    SamplingParams,
    token_ids,
)
from wire.quota import Quota, QuotaError

log = structlog.get_logger()

FULL_S = 0.05  # how long a queue that was full counts as full, unless something ends here
FAREWELL_S = 2.0  # how long `close` tries to get the last farewells out


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate."""

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0
    deadline_ms: int | None = None
    cache_salt: str | None = None
    tenant: str = "default"
    terms: Terms = PLAIN  # of the tenant
    traceparent: str | None = None  # what is done for it is traced below this span


class EngineClient:
    """Generates. One for a gateway; `run` is its background task."""

    def __init__(
        self, bus: Bus, router: OutputRouter, settings: Settings, rate: ServiceRate
    ) -> None:
        self._bus = bus
        self._router = router
        self._settings = settings
        self._rate = rate
        self._recovery = Recovery(bus, router, self._part)
        self._farewells: asyncio.Queue[AbortRequest | ResumeRequest] = asyncio.Queue()
        self._full_until = 0.0
        self._num_waiting = 0  # when it was full

    def check_room(self) -> None:
        """Raise ApiError if the queue was full a moment ago: whoever comes now need not be read."""
        if time.monotonic() < self._full_until:
            raise self._too_busy(self._num_waiting)

    async def generate(
        self,
        requests: Sequence[GenerationRequest],
        record: AnswerRecord,
        reading: Reading,
        lapsed_claim: str = "",
    ) -> AsyncGenerator[list[SequenceOutput], None]:
        """Queue these together, or none of them, and yield what comes until all have ended.

        `record` names them. Yields an empty list whenever nothing came for `idle_s`. If its client
        may come back, each output is one token, or an end that came without one. Close it
        (`aclosing`) to leave early. Raises ApiError, and ClaimedError if the client's key was used
        before: then nothing was queued.
        """
        collector = Collector()
        sequences = self._sequences(collector, record, reading)
        for sequence, request in zip(sequences, requests, strict=True):
            one = sequence.followed
            one.request = self._core_request(one, request, record)
        is_over = is_queued = False
        try:
            quota = requests[0].terms.quota
            await self._submit([s.followed for s in sequences], record, lapsed_claim, quota)
            is_queued = True
            while any(sequence.has_more for sequence in sequences):
                yield await self._next(collector, sequences, reading.idle_s)
        except ClaimedError:
            _close(sequences)
            raise
        except _NotQueuedError as error:
            _close(sequences)
            error.answer.is_refusal = True
            raise error.answer from None
        except ApiError:
            is_over = is_queued or record.claim is None  # else it may be found by its key
            raise
        finally:
            self._leave(collector, sequences, is_over=is_over)

    async def follow(
        self, record: AnswerRecord, reading: Reading
    ) -> AsyncGenerator[list[SequenceOutput], None]:
        """Yield all outputs of sequences that were queued before, here or elsewhere, as above.

        Whatever goes wrong ends nothing but this: others may follow them.
        """
        collector = Collector()
        sequences = self._sequences(collector, record, reading)
        for one in [sequence.followed for sequence in sequences]:
            if len(one.readers) == 1:
                self._router.lose(one)
        try:
            while any(sequence.has_more for sequence in sequences):
                yield await self._next(collector, sequences, reading.idle_s)
        finally:
            self._leave(collector, sequences)

    async def run(self) -> NoReturn:
        """Publish farewells and recover what was lost, until cancelled.

        Farewells are queued here rather than published on the spot, since whoever leaves early is
        being cancelled and cannot wait.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._recovery.run())
            while True:
                farewell = await self._farewells.get()
                try:
                    await self._publish(farewell)
                except BusError as error:
                    log.error("farewell_refused", req_id=farewell.req_id, error=str(error))
                finally:
                    self._farewells.task_done()

    async def close(self) -> None:
        """Wait a moment for the last farewells; call it before `run` is cancelled."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._farewells.join()
        except TimeoutError:
            log.warning("farewells_unheard", num_farewells=self._farewells.qsize())

    # ------------------------------------------------------------ coming

    def _sequences(
        self, collector: Collector, record: AnswerRecord, reading: Reading
    ) -> list[ReadSequence]:
        sequences = []
        for index, req_id in enumerate(record.req_ids):
            followed = self._router.follow(req_id, collector, index)
            followed.record = record
            sequences.append(ReadSequence(index, followed, reading))
        return sequences

    def _core_request(
        self, one: Followed, request: GenerationRequest, record: AnswerRecord
    ) -> EngineCoreRequest:
        return EngineCoreRequest(
            req_id=one.req_id,
            gateway=self._router.process,
            handle=self._router.ask(one),
            prompt_token_ids=token_ids(list(request.prompt_token_ids)),
            sampling=request.sampling,
            priority=request.priority,
            deadline_ms=request.deadline_ms,
            cache_salt=request.cache_salt,
            tenant=request.tenant,
            weight=request.terms.weight,
            resumable=record.is_resumable,
            traceparent=request.traceparent,
        )

    async def _submit(
        self,
        followed: Sequence[Followed],
        record: AnswerRecord,
        lapsed_claim: str,
        quota: Quota,
    ) -> None:
        """Queue requests. After a lost reply the same is sent again, which is harmless."""
        requests = [one.request for one in followed if one.request is not None]
        limit, retention_s = self._settings.max_queued_requests, self._settings.retention_s
        submit = partial(
            self._bus.submit, requests, limit, retention_s, record, lapsed_claim, quota=quota
        )
        try:
            await patiently(submit)
        except ClaimedError:
            raise
        except QueueFullError as error:
            if error.num_waiting >= limit:  # else there is room for fewer than these
                self._full_until = time.monotonic() + FULL_S
                self._num_waiting = error.num_waiting
            raise _NotQueuedError(self._too_busy(error.num_waiting)) from None
        except QuotaError as error:
            raise _NotQueuedError(over_quota(error.what, error.wait_s)) from None
        except BusFullError:
            raise _NotQueuedError(unavailable("the server's Redis is full; try again")) from None
        except WireError as error:
            raise _NotQueuedError(invalid(f"the request is too large: {error}")) from None
        except BusError as error:
            log.error("submit_refused", error=str(error))
            raise _NotQueuedError(internal()) from None
        for one in followed:
            one.queued_at = one.asked_at = time.monotonic()

    def _too_busy(self, num_waiting: int) -> ApiError:
        message = f"the queue is full: {num_waiting} requests wait already"
        return too_busy(message, self._rate.seconds_for(num_waiting))

    # ------------------------------------------------------------ being there

    async def _next(
        self, collector: Collector, sequences: Sequence[ReadSequence], idle_s: float
    ) -> list[SequenceOutput]:
        """Wait for outputs; empty after `idle_s`. An error is raised once all before it is out."""
        while True:
            for sequence in sequences:
                if sequence.error is not None:
                    raise sequence.error
            deltas = await collector.get(idle_s)
            outputs: list[SequenceOutput] = []
            for index, delta in deltas.items():
                if (sequence := sequences[index]).is_open:
                    outputs += sequence.advance(delta)
                    self._note_end(sequence)
            if outputs or not deltas:
                return outputs

    def _note_end(self, sequence: ReadSequence) -> None:
        """Tell the scheduler of a stop string, at the token where it was complete."""
        if sequence.stops_early:
            req_id, length = sequence.followed.req_id, sequence.num_output_tokens
            self._farewells.put_nowait(AbortRequest(req_id, "stop", length))
        if not sequence.has_more:
            self._full_until = 0.0
            self._rate.note_end(sequence.num_output_tokens)

    # ------------------------------------------------------------ leaving

    def _leave(
        self, collector: Collector, sequences: Iterable[ReadSequence], *, is_over: bool = False
    ) -> None:
        """Let go of sequences; what has not ended is aborted if the answer is over."""
        for sequence in sequences:
            one = sequence.followed
            if self._router.leave(one, collector) and sequence.is_open:
                self._full_until = 0.0
                if is_over:
                    self._farewells.put_nowait(AbortRequest(one.req_id))
                else:
                    self._part(one)

    def _part(self, one: Followed) -> None:
        """Say that nobody here waits for a sequence any more."""
        if one.is_resumable:
            self._farewells.put_nowait(ResumeRequest(one.req_id, self._router.process, NO_HANDLE))
        else:
            self._farewells.put_nowait(AbortRequest(one.req_id))

    async def _publish(self, farewell: AbortRequest | ResumeRequest) -> None:
        """Until Redis has it."""
        match farewell:
            case AbortRequest():
                await retrying(partial(self._bus.abort, farewell))
            case ResumeRequest() if not self._router.follows(farewell.req_id):
                await retrying(partial(self._bus.resume, farewell))
            case _:  # somebody has come back meanwhile
                pass


class _NotQueuedError(Exception):
    """Redis refused the submission: nothing was queued, so there is nothing to abort."""

    def __init__(self, answer: ApiError) -> None:
        super().__init__(str(answer))
        self.answer = answer


def _close(sequences: Iterable[ReadSequence]) -> None:
    for sequence in sequences:
        sequence.is_open = False
