"""Outputs to those who wait for them: one reader, and one slot for each sequence.

Owns this gateway's output stream and the handles in it. A client that reads slowly costs one slot,
in which deltas are merged, never a queue. Sees to it that no token is missing and none comes twice;
what the tokens mean is not its business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import structlog

from wire import codec
from wire.bus import Bus, Entry, retrying
from wire.messages import EngineCoreOutputs, FinishedRequest, StartedRequest

log = structlog.get_logger()

MAX_HANDLE = 2**32 - 1


@dataclass(slots=True)
class SequenceDelta:
    """What came for one sequence since it was last asked."""

    token_ids: list[int] = field(default_factory=list)
    started: StartedRequest | None = None
    finished: FinishedRequest | None = None
    gap: str | None = None  # tokens are missing: what comes after means nothing


class Collector:
    """Slots of the sequences that one client waits for."""

    def __init__(self, handles: Sequence[int]) -> None:
        self.handles = tuple(handles)
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


@dataclass(slots=True)
class _Sequence:
    collector: Collector
    index: int
    num_tokens: int = 0  # received so far, so the next one is this


class OutputRouter:
    """Fans the outputs for one incarnation of a gateway out to its open requests."""

    def __init__(self, bus: Bus, process: str) -> None:
        self.process = process
        self._bus = bus
        self._sequences: dict[int, _Sequence] = {}
        self._last_handle = 0

    def open(self, num_sequences: int) -> Collector:
        """Give handles to new sequences; outputs are kept for them from now on."""
        handles = [self._new_handle() for _ in range(num_sequences)]
        collector = Collector(handles)
        for index, handle in enumerate(handles):
            self._sequences[handle] = _Sequence(collector, index)
        return collector

    def close(self, handle: int) -> None:
        """Forget a sequence; what still comes for it is dropped."""
        self._sequences.pop(handle, None)

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
        """Put outputs into the slots they are for: starts, then tokens, then ends."""
        for started in outputs.started:
            if (sequence := self._sequences.get(started.handle)) is not None:
                sequence.collector.slot(sequence.index).started = started
        for handle, start, token_id in zip(
            outputs.handles, outputs.starts, outputs.token_ids, strict=True
        ):
            self._put_token(handle, start, token_id)
        for finished in outputs.finished:
            self._put_end(finished)

    def _read(self, entry: Entry) -> None:
        try:
            self.dispatch(codec.decode_as(EngineCoreOutputs, entry.body))
        except ValueError as error:  # WireError, or columns of unequal length
            log.error("outputs_unreadable", entry=entry.entry_id, error=str(error))

    def _put_token(self, handle: int, start: int, token_id: int) -> None:
        sequence = self._sequences.get(handle)
        if sequence is None or start < sequence.num_tokens:
            return
        if start > sequence.num_tokens:
            self._put_gap(handle, sequence, start)
            return
        sequence.num_tokens += 1
        sequence.collector.slot(sequence.index).token_ids.append(token_id)

    def _put_end(self, finished: FinishedRequest) -> None:
        sequence = self._sequences.get(finished.handle)
        if sequence is None:
            return
        if finished.num_output_tokens > sequence.num_tokens:
            self._put_gap(finished.handle, sequence, finished.num_output_tokens)
            return
        sequence.collector.slot(sequence.index).finished = finished
        self.close(finished.handle)

    def _put_gap(self, handle: int, sequence: _Sequence, end: int) -> None:
        """End a sequence whose tokens [num_tokens, end) never came."""
        missing = f"output tokens {sequence.num_tokens} to {end - 1} were lost"
        log.error("output_gap", handle=handle, missing=missing)
        sequence.collector.slot(sequence.index).gap = missing
        self.close(handle)

    def _new_handle(self) -> int:
        self._last_handle = self._last_handle % MAX_HANDLE + 1
        return self._last_handle
