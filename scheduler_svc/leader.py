"""One epoch of leadership: streams in, verbs, streams out. Of all here only the core decides.

One task touches the core, and no call into it contains an `await`, so it needs no lock.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import structlog

from scheduler_svc import recovery
from scheduler_svc.caution import Caution, EpochOverError
from scheduler_svc.chronicle import Chronicle
from scheduler_svc.commits import Commits
from scheduler_svc.core.lane import Lane
from scheduler_svc.gateways import Gateways
from scheduler_svc.intake import Intake
from scheduler_svc.ledger import Ledger
from scheduler_svc.live_config import LiveConfig, core_config
from scheduler_svc.mirror import INTERVAL_S, Mirror
from scheduler_svc.recording import new_scheduler
from scheduler_svc.roster import Roster
from scheduler_svc.statistics import Statistics
from scheduler_svc.sweeper import Sweeper
from scheduler_svc.traces import RequestTraces
from wire.bus import Bus, BusDownError, Entry, FencedError, retrying
from wire.codec import WireError, decode_as
from wire.config import Settings
from wire.messages import ModelRunnerOutput, SchedulerOutput
from wire.traces import Tracing

log = structlog.get_logger()

BLOCK_MS = 100
"""Longest wait for an event; how soon a new worker is used when nothing else happens."""

WORKERS_S = 1.0
"""How long a careful start waits for workers, so that each request is also tried in a step."""

SURVIVAL_S = 1.0
"""How long a leader must live for its start to have got through."""


class Leader:
    """One epoch of leadership, from recovery to its end."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        owner: str,
        epoch: int,
        server_ms: int,
        *,
        tracing: Tracing | None = None,
    ) -> None:
        self._bus = bus
        self._lease_s = settings.leader_lease_s
        self._owner = owner
        self._epoch = epoch
        self._clock_offset = server_ms / 1000 - time.monotonic()
        self._scheduler = new_scheduler(core_config(settings), epoch, settings.record_file)
        self._traces = (
            None if tracing is None else RequestTraces(tracing, self._scheduler, epoch, self._now)
        )
        self._ledger = Ledger()
        self._statistics = Statistics(self._scheduler, epoch)
        self._chronicle = Chronicle(bus.keys)
        self._mirror = Mirror(bus, epoch, self._chronicle, limits=lambda: self._intake.limits)
        self._reader = bus.reader({}, max_block_ms=BLOCK_MS)
        self._roster = Roster(
            bus,
            settings,
            self._scheduler,
            self._reader,
            mirror=self._mirror,
            chronicle=self._chronicle,
            traces=self._traces,
        )
        self._gateways = Gateways(
            bus, settings, self._scheduler, self._ledger, chronicle=self._chronicle
        )
        self._commits = Commits(
            bus,
            self._scheduler,
            self._ledger,
            self._statistics,
            retention_s=lambda: self._intake.settings.retention_s,
            traces=self._traces,
        )
        self._intake = Intake(
            self._scheduler,
            self._ledger,
            LiveConfig(settings, {}),
            self._chronicle,
            collect=self._commits.collect,
            links=lambda: self._roster.links,
            traces=self._traces,
        )
        self._caution = Caution(bus, epoch, self._intake, self._ledger)
        self._untried: set[str] = set()  # workers that got no step since an entry was taken in
        self._workers_by = time.monotonic() + WORKERS_S
        self._controls: list[tuple[str, recovery.Control]] = []  # that recovery found
        self._cursor = "0-0"  # where recovery stopped reading
        self._is_open = asyncio.Event()  # all that was found is taken in
        self._redis_life = ""  # run id of the server that all this was read from
        self._is_gathering = False

    # ------------------------------------------------------------ life

    async def lead(self, stopping: asyncio.Event) -> None:
        """Recover, then schedule until `stopping`. FencedError when another leads."""
        self._redis_life = await self._current_redis_life()
        sweeper = Sweeper(self._bus, self._epoch, lambda: self._roster.processes)
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(self._renew())  # there may be much to recover
            await self._recover()
            chores = [
                renewing,
                group.create_task(self._survive()),
                group.create_task(self._roster.watch()),
                group.create_task(self._gateways.watch()),
                group.create_task(self._mirror_forever()),
                group.create_task(sweeper.sweep_forever()),
            ]
            group.create_task(self._commits.run())
            while not stopping.is_set():
                await self._turn()
            self._commits.close()
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
        found = await retrying(partial(recovery.recover, self._bus))
        if await self._current_redis_life() != self._redis_life:
            raise EpochOverError("Redis was restarted while it was read")
        self._intake.restore(found.config)
        self._scheduler.restore_served(found.served)
        await self._caution.begin(found)
        self._controls, self._cursor = found.controls, found.cursor
        self._statistics.num_recovered = len(found.in_flight)
        if not self._caution.is_taking_in:
            await self._open_the_door()
        await retrying(self._clear_mirror)
        says = f"epoch {self._epoch}; requests taken over: {len(found.in_flight)}"
        self._chronicle.note("leader_changed", self._owner.rpartition(".")[0], says)
        log.info(
            "recovered", requests=len(found.in_flight), seconds=round(time.monotonic() - started, 3)
        )

    async def _open_the_door(self) -> None:
        """Once all that was found is taken in, read on from there."""
        for entry, control in self._controls:
            async with self._caution.blaming(entry):
                self._intake.control(entry, control)
        self._commits.collect()
        self._reader.cursors[self._bus.keys.requests()] = self._cursor
        self._is_open.set()
        if self._traces is not None:
            self._traces.is_recovering = False

    # ------------------------------------------------------------ one turn

    async def _turn(self) -> None:
        """Hear what happened, then send every step that may go out."""
        try:
            entries = await self._reader.read(self._patience_ms(), count=256)
        except BusDownError:
            await asyncio.sleep(0.05)
            return
        self._scheduler.note_time(self._now())
        for entry in entries:
            await self._apply(entry)
        await self._take_in()
        self._scheduler.expire(self._now())
        await self._dispatch()
        self._commits.collect()

    async def _take_in(self) -> None:
        """At a careful start, take one more entry in once every worker got a step with the last."""
        lanes = self._scheduler.lanes
        if self._is_open.is_set() or self._untried & lanes.keys():
            return
        if not lanes and time.monotonic() < self._workers_by:
            return
        if self._caution.is_taking_in:
            self._untried = set(lanes)
            await self._caution.take_next()
        else:
            await self._caution.all_in()
            await self._open_the_door()

    def _patience_ms(self) -> int:
        """How long to wait for an event: until something is due without one."""
        wake = self._scheduler.next_wake()
        until_wake = BLOCK_MS if wake is None else round((wake - self._now()) * 1000) + 1
        if self._is_gathering or not self._is_open.is_set():
            until_wake = min(until_wake, 1)
        return max(1, min(BLOCK_MS, until_wake))

    async def _apply(self, entry: Entry) -> None:
        try:
            if entry.key == self._bus.keys.requests():
                message = recovery.understand(entry)
                async with self._caution.blaming(entry.entry_id):
                    self._intake.take(entry.entry_id, message)
            else:
                self._apply_result(entry)
        except WireError as error:
            log.error("entry_buried", stream=entry.key, entry=entry.entry_id, error=str(error))
            await retrying(partial(self._bus.bury, entry, str(error)))

    def _apply_result(self, entry: Entry) -> None:
        process = self._roster.process_with_results(entry.key)
        if process is None:
            return
        try:
            result = decode_as(ModelRunnerOutput, entry.body)
        except WireError as error:
            self._roster.lose(process, f"its result cannot be read: {error}")
            return
        if self._roster.take_fence_answer(process, result):
            return
        lane = self._scheduler.lanes.get(process)
        has_more = lane is not None and len(lane.in_flight) > 1
        self._statistics.note_result(process, result.device_us, time.monotonic(), has_more=has_more)
        if not self._scheduler.update_from_output(process, result):
            self._roster.lose(process, result.failed or "its result does not fit the step")

    async def _dispatch(self) -> None:
        """Send the steps first: they keep the devices busy. What was decided is committed after."""
        lanes, most = self._scheduler.lanes, self._intake.settings.steps_in_flight
        self._is_gathering = False
        if self._roster.is_settling:
            return
        for process in list(lanes):  # any of which may be lost while a step is being sent
            if process in lanes and self._gathers(lanes[process]):
                self._is_gathering = True
                continue
            while process in lanes and len(lanes[process].in_flight) < most:
                step = self._scheduler.schedule(process, self._now())
                self._untried.discard(process)
                if step is None:
                    break
                await self._publish(process, step)

    def _gathers(self, lane: Lane) -> bool:
        """Whether an idle worker waits a little, so that requests that come together start so.

        Never longer than BATCH_WAIT_MS after the last arrival that it could have started with.
        """
        wait_s = self._intake.settings.batch_wait_ms / 1000
        if wait_s == 0 or lane.in_flight or lane.running:
            return False
        oldest = min((r.arrival for r in self._scheduler.waiting), default=0.0)
        return self._now() - oldest < wait_s

    async def _publish(self, process: str, step: SchedulerOutput) -> None:
        self._statistics.note_step()
        if self._traces is not None:
            self._traces.stepped(process, step)
        await retrying(partial(self._bus.publish_step, process, step))
        log.debug("step_dispatched", worker=process, step_id=step.step_id)

    # ------------------------------------------------------------ chores

    async def _renew(self) -> None:
        """Hold the lease, and with each renewal look at the server's clock, and whether it is new.

        A server that was restarted, or another that took its place, may have forgotten steps and
        results behind the last commit. Nobody can tell which, so this epoch ends and the next one
        begins from what is there.
        """
        while True:
            await asyncio.sleep(self._lease_s / 5)
            epoch, now_ms = await retrying(
                partial(self._bus.lead, self._owner, self._lease_s, self._epoch),
                max_pause_s=self._lease_s / 5,  # or a worker's time would be up between two tries
                on_failure=self._forgive_silence,
            )
            if epoch != self._epoch:
                raise FencedError("another scheduler leads")
            if await self._current_redis_life() != self._redis_life:
                raise EpochOverError("Redis was restarted")
            self._clock_offset = now_ms / 1000 - time.monotonic()

    def _forgive_silence(self) -> None:
        """Redis takes nothing, though it may be read: whoever seems silent may well be talking."""
        self._roster.forgive_silence()
        self._gateways.forgive_silence()

    async def _survive(self) -> None:
        await self._is_open.wait()
        await asyncio.sleep(SURVIVAL_S)
        await self._caution.survive()

    async def _current_redis_life(self) -> str:
        return (await retrying(self._bus.server)).get("run_id", "")

    async def _clear_mirror(self) -> None:
        await self._mirror.clear(await self._bus.processes("worker"))

    async def _mirror_forever(self) -> None:
        """Show the queues."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self._mirror.write(self._scheduler, self._roster.names)
            except BusDownError:
                continue
