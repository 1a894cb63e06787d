"""The shell around the core: streams in, verbs, streams out. The only code here that awaits.

One task touches the core, and no call into it contains an `await`, so it needs no lock. Of all the
scheduler processes of a pool one leads; the others stand by and take the next epoch when its lease
lapses.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from functools import partial

import structlog

from scheduler_svc import recovery
from scheduler_svc.core.lane import Lane
from scheduler_svc.gateways import Gateways
from scheduler_svc.ledger import Ledger
from scheduler_svc.live_config import LiveConfig, core_config
from scheduler_svc.mirror import INTERVAL_S, Mirror
from scheduler_svc.recording import check_record_file, new_scheduler
from scheduler_svc.roster import Roster
from scheduler_svc.statistics import Statistics
from scheduler_svc.sweeper import Sweeper
from wire.bus import Bus, BusDownError, Commit, Entry, FencedError, retrying
from wire.codec import WireError, decode_as
from wire.config import Settings, new_incarnation, process_id
from wire.keys import arrival_ms, entry_id, request_number
from wire.messages import (
    AbortRequest,
    ConfigChange,
    EngineCoreRequest,
    ModelRunnerOutput,
    ResumeRequest,
    SchedulerOutput,
    crc_of,
)
from wire.service import connect, heartbeat

log = structlog.get_logger()

BLOCK_MS = 100
"""Longest wait for an event; how soon a new worker is used when nothing else happens."""


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Lead the pool or stand by for it, until told to stop."""
    check_record_file(settings.record_file)
    bus = await connect(settings, stopping)
    candidate = Candidate(bus, settings, stopping)
    try:
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(candidate.beat())
            await candidate.run()
            beating.cancel()
    finally:
        await candidate.withdraw()
        await bus.close()


class Candidate:
    """One process that leads, or would if the leader fell."""

    def __init__(self, bus: Bus, settings: Settings, stopping: asyncio.Event) -> None:
        self._bus = bus
        self._settings = settings
        self._stopping = stopping
        self._name = process_id("scheduler")
        self._incarnation = new_incarnation()
        self._owner = f"{self._name}.{self._incarnation}"
        self._epoch = 0  # that this process leads, 0: none

    async def beat(self) -> None:
        """Say who we are, over and over."""
        ttl_s = 3 * self._settings.leader_lease_s
        await heartbeat(
            self._bus, "scheduler", self._name, self._incarnation, self._beat_fields, ttl_s
        )

    def _beat_fields(self) -> dict[str, str | int]:
        return {"state": "leader" if self._epoch else "standby", "epoch": self._epoch}

    async def run(self) -> None:
        """Try for the lease; lead while it holds; try again."""
        lease_s = self._settings.leader_lease_s
        while not self._stopping.is_set():
            floor = await retrying(self._highest_epoch_seen)
            epoch, now_ms = await retrying(
                partial(self._bus.lead, self._owner, lease_s, floor=floor)
            )
            if epoch == 0:
                await _pause(self._stopping, lease_s / 5)
                continue
            self._epoch = epoch
            log.info("lead_taken", epoch=epoch)
            leader = Leader(self._bus, self._settings, self._owner, epoch, now_ms)
            try:
                await leader.lead(self._stopping)
            except* FencedError as group:
                log.warning("lead_lost", epoch=epoch, reason=str(group.exceptions[0]))
            finally:
                self._epoch = 0
                await leader.close()

    async def withdraw(self) -> None:
        """Let another lead at once."""
        try:
            await self._bus.release_lead(self._owner)
            await self._bus.leave("scheduler", self._name)
        except BusDownError:
            return

    async def _highest_epoch_seen(self) -> int:
        """Workers remember the epochs that a Redis which lost its data does not."""
        workers = await self._bus.processes("worker")
        return 1 + max((int(fields.get("epoch", 0)) for fields in workers.values()), default=0)


class Leader:
    """One epoch of leadership, from recovery to its end."""

    def __init__(
        self, bus: Bus, settings: Settings, owner: str, epoch: int, server_ms: int
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._owner = owner
        self._epoch = epoch
        self._clock_offset = server_ms / 1000 - time.monotonic()
        self._scheduler = new_scheduler(core_config(settings), epoch, settings.record_file)
        self._ledger = Ledger()
        self._statistics = Statistics(self._scheduler, epoch)
        self._mirror = Mirror(bus)
        self._reader = bus.reader({}, max_block_ms=BLOCK_MS)
        self._roster = Roster(bus, settings, self._scheduler, self._reader, self._mirror)
        self._gateways = Gateways(bus, settings, self._scheduler, self._ledger)
        self._held_until = time.monotonic() + settings.leader_lease_s  # the lease, for certain
        self._redis_life = ""  # run id of the server that all this was read from
        self._uncommitted = asyncio.Event()
        self._num_commits = 0
        self._live = LiveConfig(settings, {})
        self._is_closing = False
        self._is_gathering = False

    # ------------------------------------------------------------ life

    async def lead(self, stopping: asyncio.Event) -> None:
        """Recover, then schedule until `stopping`. FencedError when another leads."""
        await self._recover()
        async with asyncio.TaskGroup() as group:
            chores = [
                group.create_task(self._renew()),
                group.create_task(self._roster.watch()),
                group.create_task(self._gateways.watch()),
                group.create_task(self._mirror_forever()),
                group.create_task(
                    Sweeper(self._bus, lambda: self._roster.processes).sweep_forever()
                ),
            ]
            group.create_task(self._commit_until_closed())
            while not stopping.is_set():
                await self._turn()
            self._is_closing = True
            self._uncommitted.set()
            for chore in chores:
                chore.cancel()

    async def close(self) -> None:
        """Give the reader's connection back."""
        await self._reader.close()

    def _now(self) -> float:
        """Seconds of the Redis server's clock."""
        return time.monotonic() + self._clock_offset

    async def _recover(self) -> None:
        started = time.monotonic()
        self._redis_life = await self._current_redis_life()
        found = await retrying(partial(recovery.recover, self._bus))
        self._live = LiveConfig(self._settings, found.config)
        self._reconfigure()
        self._scheduler.restore_served(found.served)
        for one in found.in_flight:
            self._add(one.req, one.request, one.num_saved)
        for entry, control in found.controls:
            self._control(entry, control)
        self._collect()
        self._statistics.num_recovered = len(found.in_flight)
        self._reader.cursors[self._bus.keys.requests()] = found.cursor
        await retrying(self._clear_mirror)
        log.info(
            "recovered", requests=len(found.in_flight), seconds=round(time.monotonic() - started, 3)
        )

    # ------------------------------------------------------------ one turn

    async def _turn(self) -> None:
        """Hear what happened, then send every step that may go out."""
        try:
            entries = await self._reader.read(self._patience_ms(), count=256)
        except BusDownError:
            await asyncio.sleep(0.05)
            return
        for entry in entries:
            await self._apply(entry)
        self._scheduler.expire(self._now())
        await self._dispatch()
        self._collect()

    def _patience_ms(self) -> int:
        """How long to wait for an event: until something is due without one."""
        wake = self._scheduler.next_wake()
        until_wake = BLOCK_MS if wake is None else round((wake - self._now()) * 1000) + 1
        if self._is_gathering:
            until_wake = min(until_wake, 1)
        return max(1, min(BLOCK_MS, until_wake))

    async def _apply(self, entry: Entry) -> None:
        try:
            if entry.key == self._bus.keys.requests():
                self._apply_request(entry)
            else:
                self._apply_result(entry)
        except WireError as error:
            log.error("entry_buried", stream=entry.key, entry=entry.entry_id, error=str(error))
            await retrying(partial(self._bus.bury, entry, str(error)))

    def _apply_request(self, entry: Entry) -> None:
        message = recovery.understand(entry)
        if isinstance(message, EngineCoreRequest):
            self._add(request_number(entry.entry_id), message)
        else:
            self._control(entry.entry_id, message)

    def _add(self, req: int, request: EngineCoreRequest, num_saved: int = 0) -> None:
        """Take a request on. Of two submissions of one request, the client's longer prefix wins."""
        if self._ledger.number(request.req_id) is not None:
            self._collect()  # it may have ended just now
        before = self._ledger.number(request.req_id)
        if before is not None and self._covers(before, request):
            prefix = request.output_token_ids
            resume = ResumeRequest(request.req_id, request.gateway, request.handle, len(prefix))
            self._ledger.follow(before, resume, self._output(before))
            self._ledger.control_done(entry_id(req))
            return
        if before is not None:
            self._ledger.drop(before)
            self._scheduler.abort_request(before)
            self._scheduler.take_outputs()  # its end is nobody's business
        self._ledger.track(req, request, num_saved)
        self._scheduler.add_request(req, request, arrival_ms(req) / 1000)

    def _covers(self, req: int, request: EngineCoreRequest) -> bool:
        prefix = request.output_token_ids
        return self._output(req)[: len(prefix)] == prefix

    def _output(self, req: int) -> array[int]:
        return self._scheduler.requests[req].output_token_ids

    def _control(self, entry: str, control: recovery.Control) -> None:
        match control:
            case ResumeRequest():
                self._resume(self._ledger.number(control.req_id), control)
            case AbortRequest():
                req = self._ledger.number(control.req_id)
                if req is not None:
                    self._scheduler.abort_request(req, control.reason, control.num_output_tokens)
            case ConfigChange():
                outcome = self._live.apply(control, self._roster.links)
                self._ledger.note_config(outcome)
                self._reconfigure()
                if control.reset_prefix_cache and not outcome["refused"]:
                    self._scheduler.reset_prefix_cache()
        self._ledger.control_done(entry)

    def _reconfigure(self) -> None:
        self._settings = self._live.settings
        config = core_config(self._settings, self._live.version)
        if config != self._scheduler.config:
            self._scheduler.reconfigure(config)
            log.info("reconfigured", version=self._live.version)

    def _resume(self, req: int | None, resume: ResumeRequest) -> None:
        self._collect()  # so that what is followed from here on is what comes after
        if req is None or req not in self._scheduler.requests:
            self._ledger.deny(resume)
            return
        output = self._output(req)
        prefix = output[: resume.num_output_tokens]
        if len(prefix) < resume.num_output_tokens or crc_of(prefix) != resume.crc:
            self._ledger.deny(resume)
            return
        self._ledger.follow(req, resume, output)

    def _apply_result(self, entry: Entry) -> None:
        process = self._roster.process_with_results(entry.key)
        if process is None:
            return
        try:
            result = decode_as(ModelRunnerOutput, entry.body)
        except WireError as error:
            self._roster.lose(process, f"its result cannot be read: {error}")
            return
        self._statistics.device_us += result.device_us
        if not self._scheduler.update_from_output(process, result):
            self._roster.lose(process, result.failed or "its result does not fit the step")

    async def _dispatch(self) -> None:
        """Send the steps first: they keep the devices busy. What was decided is committed after."""
        lanes = self._scheduler.lanes
        self._is_gathering = False
        for process in list(lanes):  # any of which may be lost while a step is being sent
            if process in lanes and self._gathers(lanes[process]):
                self._is_gathering = True
                continue
            while process in lanes and (
                len(lanes[process].in_flight) < self._settings.steps_in_flight
            ):
                step = self._scheduler.schedule(process, self._now())
                if step is None:
                    break
                await self._publish(process, step)

    def _gathers(self, lane: Lane) -> bool:
        """Whether an idle worker waits a little, so that requests that come together start so.

        Never longer than BATCH_WAIT_MS after the last arrival that it could have started with.
        """
        wait_s = self._settings.batch_wait_ms / 1000
        if wait_s == 0 or lane.in_flight or lane.running:
            return False
        oldest = min((r.arrival for r in self._scheduler.waiting), default=0.0)
        return self._now() - oldest < wait_s

    async def _publish(self, process: str, step: SchedulerOutput) -> None:
        await retrying(partial(self._bus.publish_step, process, step))
        log.debug("step_dispatched", worker=process, step_id=step.step_id)

    # ------------------------------------------------------------ commits

    def _collect(self) -> None:
        """Hand what the core decided to the ledger."""
        outputs = self._scheduler.take_outputs()
        if outputs:
            requests = self._scheduler.requests
            started = [one.req for one in outputs.started if one.req in requests]
            self._ledger.add(outputs, {req: requests[req].worker or "" for req in started})
        self._uncommitted.set()

    async def _commit_until_closed(self) -> None:
        """One commit at a time; what comes meanwhile shares the next."""
        while not self._is_closing:
            await self._uncommitted.wait()
            self._uncommitted.clear()
            commit = self._ledger.take(self._statistics.figures(), self._scheduler.served)
            if commit is not None:
                await self._commit(commit)

    async def _commit(self, commit: Commit) -> None:
        self._num_commits += 1
        number = self._num_commits
        started = time.monotonic()
        retention_s = self._settings.retention_s
        await retrying(partial(self._bus.commit, self._epoch, number, commit, retention_s))
        self._statistics.note_commit(time.monotonic() - started)

    # ------------------------------------------------------------ chores

    async def _renew(self) -> None:
        """Hold the lease, and with each renewal look at the server's clock, and whether it is new.

        A server that was restarted, or another that took its place, may have forgotten steps and
        results behind the last commit. Nobody can tell which, so this epoch ends and the next one
        begins from what is there.
        """
        lease_s = self._settings.leader_lease_s
        while True:
            await asyncio.sleep(lease_s / 5)
            asked = time.monotonic()
            epoch, now_ms = await retrying(
                partial(self._bus.lead, self._owner, lease_s, self._epoch)
            )
            if epoch != self._epoch:
                raise FencedError("another scheduler leads")
            if await self._current_redis_life() != self._redis_life:
                raise FencedError("Redis was restarted")
            self._held_until = asked + lease_s
            self._clock_offset = now_ms / 1000 - time.monotonic()

    async def _current_redis_life(self) -> str:
        return (await retrying(self._bus.server)).get("run_id", "")

    async def _clear_mirror(self) -> None:
        await self._mirror.clear(await self._bus.processes("worker"))

    async def _mirror_forever(self) -> None:
        """Show the queues. No epoch guards them, so whoever may be deposed keeps off them."""
        # Whoever led before may not know, and write for as long as its lease would have lasted.
        once_more_at = time.monotonic() + self._settings.leader_lease_s
        while True:
            await asyncio.sleep(INTERVAL_S)
            now = time.monotonic()
            if now > self._held_until:
                continue
            try:
                if now > once_more_at:
                    await self._clear_mirror()
                    once_more_at = math.inf
                await self._mirror.write(self._scheduler, self._roster.names)
            except BusDownError:
                continue


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    """Sleep, but not through the order to stop."""
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        return
