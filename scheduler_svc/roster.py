"""Which workers there are: welcomes them, judges them, gives them up, and takes them back.

Owns the links to the workers of one leader. Tells the core who came and who went, and the reader
whose results to follow. No answer of a worker is believed here: its result stream is.
"""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

import structlog

from scheduler_svc.chronicle import Chronicle
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.mirror import Mirror
from scheduler_svc.traces import RequestTraces
from scheduler_svc.worker_link import STREAM_TTL_S, WorkerLink, process_of
from wire.bus import Bus, BusDownError, FencedError, Reader
from wire.config import Settings
from wire.keys import id_before
from wire.messages import ModelRunnerOutput, SchedulerOutput
from wire.service import HEARTBEAT_S

log = structlog.get_logger()

FieldsOf = dict[str, dict[str, str]]
"""What each worker's heartbeat says, by the worker's name; nothing if it is silent."""

NOBODY = ""
"""Is awaited until the first look is over."""

GAP_S = 3 * HEARTBEAT_S
"""Time between two looks from which on it was this process, or Redis, that did not move."""


class Roster:
    """The workers that the leader schedules on."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        scheduler: Scheduler,
        reader: Reader,
        *,
        mirror: Mirror,
        chronicle: Chronicle,
        traces: RequestTraces | None = None,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._scheduler = scheduler
        self._reader = reader
        self._mirror = mirror
        self._chronicle = chronicle
        self._traces = traces
        self._links: dict[str, WorkerLink] = {}  # by process
        self._by_results: dict[str, str] = {}  # key of a result stream -> process
        self._given_up: dict[str, WorkerLink] = {}
        self._lost: list[WorkerLink] = []  # whose streams are still as if they lived
        self._refused: set[str] = set()
        self._last_look = time.monotonic()
        self._unheard = {NOBODY}  # of the first look, those whose answer is awaited
        self._settled_by = self._last_look + settings.worker_timeout_s

    @property
    def names(self) -> dict[str, str]:
        """Name of the worker by its process."""
        return {process: link.name for process, link in self._links.items()}

    @property
    def links(self) -> list[WorkerLink]:
        """The workers that are scheduled on. Not to be changed."""
        return list(self._links.values())

    @property
    def processes(self) -> set[str]:
        """Every incarnation that steps are sent to, or may be again."""
        return {*self._links, *self._given_up}

    def process_with_results(self, key: str) -> str | None:
        """Whose result stream this is; None if that worker was given up."""
        return self._by_results.get(key)

    async def watch(self) -> NoReturn:
        """Look at the heartbeats, over and over."""
        while True:
            try:
                await self.look()
            except BusDownError:
                self.forgive_silence()
            await asyncio.sleep(HEARTBEAT_S)

    async def look(self) -> None:
        """Look at the heartbeats once: give up who is gone, take on who is new."""
        fields_of = await self._bus.processes("worker")
        self._note_look()
        await self._judge(fields_of)
        await self._welcome(fields_of)
        self._unheard.discard(NOBODY)

    def lose(self, process: str, reason: str, *, is_orderly: bool = False) -> None:
        """Give a worker up; what ran on it waits for another, or for its return."""
        link = self._links.pop(process, None)
        if link is None:
            return
        self._unheard.discard(process)
        results = self._bus.keys.results(process)
        del self._by_results[results], self._reader.cursors[results]
        if process in self._scheduler.lanes:
            link.last_step = self._scheduler.lanes[process].next_step - 1
        self._given_up[process] = link
        self._lost.append(link)
        says = reason
        if (lane := self._scheduler.lanes.get(process)) is not None:
            num_moved = len(lane.running) + len(lane.ending) + len(lane.swapped)
            says = f"{reason}; requests that wait again: {num_moved}"
            if self._traces is not None:
                self._traces.lost(process)
            self._scheduler.remove_worker(process, is_orderly=is_orderly)
        self._chronicle.note("worker_lost", link.name, says)
        log.warning("worker_lost", worker=process, reason=reason)

    def forgive_silence(self) -> None:
        """Nobody could be heard for a while: that is no worker's fault."""
        now = time.monotonic()
        for link in self._links.values():
            link.beats_changed = now

    async def _judge(self, fields_of: FieldsOf) -> None:
        now = time.monotonic()
        settings = self._settings
        for process, link in list(self._links.items()):
            fields = fields_of.get(link.name)
            is_orderly = fields is None or fields.get("state") == "draining"
            if fields is None:
                reason: str | None = "it left"
            else:
                link.heard(fields, now)
                reason = link.why_lost(
                    fields, now, settings.worker_timeout_s, settings.step_timeout_s
                )
            if reason is not None:
                self.lose(process, reason, is_orderly=is_orderly)
        while self._lost:
            await self._lay_out(self._lost[0])
            self._lost.pop(0)

    async def _welcome(self, fields_of: FieldsOf) -> None:
        for name, fields in fields_of.items():
            process = process_of(name, fields)
            if fields.get("state") != "ready" or process in self._links:
                continue
            if process in self._refused:
                continue
            before = self._given_up.get(process)
            if before is not None and not before.is_back(fields, self._settings.step_timeout_s):
                continue
            try:
                link = WorkerLink.of(name, fields, time.monotonic())
                self._check(link)
                link.check(self._scheduler.config)
            except (KeyError, ValueError) as error:
                self._refused.add(process)
                log.error("worker_refused", worker=process, error=repr(error))
                self._chronicle.note("worker_refused", name, str(error))
                continue
            if before is not None:
                link.last_step = before.last_step + 1
            await self._take(link)
        for process, link in list(self._given_up.items()):
            said = fields_of.get(link.name)
            if said is None or (said and process_of(link.name, said) != process):
                del self._given_up[process]  # it left, or begins a new life

    def _check(self, link: WorkerLink) -> None:
        """Raise ValueError if a worker cut its memory otherwise than those that came before."""
        size = link.capacity.block_size
        for other in self._links.values():
            if other.capacity.block_size != size:
                theirs = other.capacity.block_size
                raise ValueError(f"block_size ({size}) must be that of the others ({theirs})")

    async def _take(self, link: WorkerLink) -> None:
        """Fence the worker off from whatever it did before; it is used once it has answered."""
        process, epoch, keys = link.process, self._scheduler.epoch, self._bus.keys
        fence = SchedulerOutput(epoch, link.last_step, is_fence=True)
        try:
            await self._bus.publish_step(process, fence)
        except FencedError:
            return  # by a later leader, as the next commit will find out
        streams = (keys.steps(process), keys.results(process))
        await self._bus.write_as_leader(epoch, [("PERSIST", key) for key in streams])
        self._reader.cursors[keys.results(process)] = id_before(epoch, link.last_step)
        self._by_results[keys.results(process)] = process
        self._given_up.pop(process, None)
        link.is_fenced = True
        if NOBODY in self._unheard:
            self._unheard.add(process)
        self._links[process] = link

    def take_fence_answer(self, process: str, result: ModelRunnerOutput) -> bool:
        """Use a worker from now on, and what it says that it holds; False if this is no answer."""
        link = self._links[process]
        if not link.is_fenced or (result.epoch, result.step_id) != (
            self._scheduler.epoch,
            link.last_step,
        ):
            return False
        if result.failed is not None:
            self.lose(process, result.failed)
            return True
        link.is_fenced = False
        self._unheard.discard(process)
        self._scheduler.add_worker(process, link.capacity, link.last_step)
        num_tokens = self._scheduler.adopt(process, result.held)
        self._chronicle.note("worker_added", link.name, f"blocks: {link.capacity.num_blocks}")
        log.info(
            "worker_added",
            worker=process,
            num_blocks=link.capacity.num_blocks,
            held=len(result.held),
            adopted=num_tokens,
        )
        return True

    @property
    def is_settling(self) -> bool:
        """Whether the workers that were there at first may still say what they hold.

        Until then no step goes out, so that requests go back to where their blocks are.
        """
        return bool(self._unheard) and time.monotonic() < self._settled_by

    async def _lay_out(self, link: WorkerLink) -> None:
        """Let what a lost incarnation leaves behind fade, unless it comes back."""
        keys = self._bus.keys
        streams = (keys.steps(link.process), keys.results(link.process))
        fading = [("EXPIRE", key, STREAM_TTL_S) for key in streams]
        await self._bus.write_as_leader(self._scheduler.epoch, fading)
        await self._mirror.forget_worker(link.name)

    def _note_look(self) -> None:
        """After a time in which nobody could be heard, nobody's silence counts."""
        now = time.monotonic()
        if now - self._last_look > GAP_S:
            self.forgive_silence()
        self._last_look = now
