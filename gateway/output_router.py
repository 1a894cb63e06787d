"""Outputs to those who wait for them: one reader, and one slot for each sequence of a client.

Owns this gateway's output stream, the handles in it, and the tokens of every sequence that a client
here waits for: what a client was given is the truth. A client that reads slowly costs one slot, in
which deltas are merged, never a queue. Sees to it that no token is missing and none comes twice;
a sequence with which something is wrong is given to `gateway.recovery` under no handle, since what
still comes under the old one belongs to nobody.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from dataclasses import dataclass, field
from typing import NoReturn

import structlog

from wire import codec
from wire.answer_record import AnswerRecord
from wire.bus import Bus, Entry, retrying
from wire.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    StartedRequest,
    token_ids,
)

log = structlog.get_logger()

MAX_HANDLE = 2**32 - 1
NO_HANDLE = 0
SILENCE_S = 2.0
"""A report so soon after the scheduler was asked for something may not know of it yet."""


@dataclass(slots=True)
class SequenceDelta:
    """What came for one sequence since it was last asked."""

    token_ids: list[int] = field(default_factory=list)
    started: StartedRequest | None = None
    finished: FinishedRequest | None = None
    failure: str | None = None  # it cannot go on


class Collector:
    """Slots of the sequences that one client waits for, by their index in its answer."""

    def __init__(self) -> None:
        self._slots: dict[int, SequenceDelta] = {}
        self._ready = asyncio.Event()

    def slot(self, index: int) -> SequenceDelta:
        """Give the slot of a sequence to write to, and wake the reader."""
        self._ready.set()
        if index not in self._slots:
            self._slots[index] = SequenceDelta()
        return self._slots[index]

    async def get(self, timeout_s: float) -> dict[int, SequenceDelta]:
        """Wait for anything new and take it all, by sequence; empty if nothing came in time."""
        if not self._slots:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()
            except TimeoutError:
                return {}
        self._ready.clear()
        slots, self._slots = self._slots, {}
        return slots


@dataclass(slots=True, eq=False)
class Followed:
    """One sequence as far as this gateway has it, and who of its clients waits for it."""

    req_id: str
    record: AnswerRecord | None = None  # of the answer that it belongs to
    request: EngineCoreRequest | None = None  # as it was submitted, to submit it again
    readers: list[tuple[Collector, int]] = field(default_factory=list)
    output: array[int] = field(default_factory=token_ids)
    logprobs: dict[int, bytes] = field(default_factory=dict)  # records from an output token on
    started: StartedRequest | None = None
    handle: int = NO_HANDLE
    queued_at: float = 0.0  # when it was first queued, monotonic seconds
    asked_at: float = math.inf  # when the scheduler was last asked for it
    was_denied: bool = False  # the scheduler does not know it
    num_resubmissions: int = 0  # without a token since
    num_tokens_then: int = 0

    @property
    def is_resumable(self) -> bool:
        """Whether its client may come back to it."""
        return self.record is not None and self.record.is_resumable

    def start(self, started: StartedRequest) -> None:
        """Note its first start; a later one follows a loss, and is nobody's business."""
        if self.started is None:
            self.started = started
            for collector, index in self.readers:
                collector.slot(index).started = started

    def add(self, token_id: int) -> None:
        """Append the next token."""
        self.output.append(token_id)
        for collector, index in self.readers:
            collector.slot(index).token_ids.append(token_id)


class OutputRouter:
    """Fans the outputs for one incarnation of a gateway out to its open requests."""

    def __init__(self, bus: Bus, process: str) -> None:
        self.process = process
        self._bus = bus
        self._by_req_id: dict[str, Followed] = {}
        self._by_handle: dict[int, Followed] = {}
        self._last_handle = NO_HANDLE
        self._lost: asyncio.Queue[Followed] = asyncio.Queue()

    # ------------------------------------------------------------ clients

    def follow(self, req_id: str, collector: Collector, index: int) -> Followed:
        """Let a client wait for a sequence; its slot has at once what is known of it here."""
        one = self._by_req_id.setdefault(req_id, Followed(req_id))
        one.readers.append((collector, index))
        if one.output or one.started:
            slot = collector.slot(index)
            slot.token_ids.extend(one.output)
            slot.started = one.started
        return one

    def follows(self, req_id: str) -> bool:
        """Whether a client here waits for a sequence."""
        return req_id in self._by_req_id

    def leave(self, one: Followed, collector: Collector) -> bool:
        """Let a client wait no longer; True if nobody here does any more."""
        one.readers = [reader for reader in one.readers if reader[0] is not collector]
        if not one.readers:
            self._forget(one)
        return not one.readers

    # ------------------------------------------------------------ the scheduler's side

    def ask(self, one: Followed) -> int:
        """Give a sequence a new handle, under which the scheduler is about to be asked for it."""
        self._by_handle.pop(one.handle, None)
        self._last_handle = self._last_handle % MAX_HANDLE + 1
        one.handle = self._last_handle
        self._by_handle[one.handle] = one
        return one.handle

    def lose(self, one: Followed) -> None:
        """Hand a sequence to whoever asks `next_lost`."""
        self._by_handle.pop(one.handle, None)
        one.handle = NO_HANDLE
        self._lost.put_nowait(one)

    async def next_lost(self) -> Followed:
        """Wait for a sequence that the scheduler must be asked about."""
        while not (one := await self._lost.get()).readers:
            pass
        return one

    def end(self, one: Followed, finished: FinishedRequest) -> None:
        """Tell a sequence's clients how it ended."""
        for collector, index in one.readers:
            collector.slot(index).finished = finished
        self._forget(one)

    def fail(self, one: Followed, reason: str) -> None:
        """Tell a sequence's clients that it cannot go on."""
        for collector, index in one.readers:
            collector.slot(index).failure = reason
        self._forget(one)

    async def run(self) -> NoReturn:
        """Read the stream until cancelled, whatever Redis does meanwhile."""
        reader = self._bus.reader({self._bus.keys.out(self.process): "0-0"})
        try:
            while True:
                for entry in await retrying(reader.read):
                    self._read(entry)
        finally:
            await reader.close()

    def dispatch(self, outputs: EngineCoreOutputs) -> None:
        """Put outputs into the slots they are for: starts, then tokens, then ends.

        Log-probabilities go before the tokens that they are of.
        """
        for logprobs in outputs.logprobs:
            if (one := self._by_handle.get(logprobs.handle)) is not None:
                one.logprobs[logprobs.start] = logprobs.records
        for started in outputs.started:
            if (one := self._by_handle.get(started.handle)) is not None:
                one.start(started)
        for handle, start, token_id in zip(
            outputs.handles, outputs.starts, outputs.token_ids, strict=True
        ):
            self._put_token(handle, start, token_id)
        for finished in outputs.finished:
            self._put_end(finished)
        for handle in outputs.unknown:
            if (one := self._by_handle.get(handle)) is not None:
                one.was_denied = True
                self.lose(one)
        if outputs.held is not None:
            self._compare(set(outputs.held))

    # ------------------------------------------------------------ inside

    def _read(self, entry: Entry) -> None:
        try:
            self.dispatch(codec.decode_as(EngineCoreOutputs, entry.body))
        except ValueError as error:  # WireError, or columns of unequal length
            log.error("outputs_unreadable", entry=entry.entry_id, error=str(error))

    def _put_token(self, handle: int, start: int, token_id: int) -> None:
        one = self._by_handle.get(handle)
        if one is None:
            return
        num_tokens = len(one.output)
        if start == num_tokens:
            one.add(token_id)
        elif start > num_tokens or one.output[start] != token_id:
            log.warning("output_lost", req_id=one.req_id, has=num_tokens, came=start)
            self.lose(one)

    def _put_end(self, finished: FinishedRequest) -> None:
        one = self._by_handle.get(finished.handle)
        if one is None:
            return
        if finished.num_output_tokens > len(one.output):
            log.warning("output_lost", req_id=one.req_id, has=len(one.output))
            self.lose(one)
        else:
            self.end(one, finished)

    def _compare(self, held: set[int]) -> None:
        """Ask for what the scheduler should hold for us, and does not."""
        deadline = time.monotonic() - SILENCE_S
        for one in [one for handle, one in self._by_handle.items() if handle not in held]:
            if one.asked_at < deadline:
                log.warning("request_not_held", req_id=one.req_id, has=len(one.output))
                self.lose(one)

    def _forget(self, one: Followed) -> None:
        self._by_handle.pop(one.handle, None)
        if self._by_req_id.get(one.req_id) is one:
            del self._by_req_id[one.req_id]
