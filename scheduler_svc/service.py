"""A scheduler process: it leads the pool, or stands by to take the next epoch.

Of all the scheduler processes of a pool one leads (`scheduler_svc.leader`); the others try for its
lease, which lapses when it falls.
"""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from scheduler_svc.caution import EpochOverError
from scheduler_svc.leader import Leader
from scheduler_svc.recording import check_record_file
from wire.bus import Bus, BusDownError, FencedError, retrying
from wire.config import Settings, new_incarnation, process_id
from wire.service import connect, heartbeat
from wire.traces import Tracing, open_tracing

log = structlog.get_logger()


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Lead the pool or stand by for it, until told to stop."""
    check_record_file(settings.record_file)
    name = process_id("scheduler")
    tracing = open_tracing(settings, "scheduler", name)
    bus = await connect(settings, stopping)
    candidate = Candidate(bus, settings, stopping, name, tracing)
    try:
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(candidate.beat())
            await candidate.run()
            beating.cancel()
    finally:
        await candidate.withdraw()
        await bus.close()
        if tracing is not None:
            await tracing.close()


class Candidate:
    """One process that leads, or would if the leader fell."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        stopping: asyncio.Event,
        name: str,
        tracing: Tracing | None,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._stopping = stopping
        self._name = name
        self._tracing = tracing
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
            leader = Leader(
                self._bus, self._settings, self._owner, epoch, now_ms, tracing=self._tracing
            )
            try:
                await leader.lead(self._stopping)
            except* (FencedError, EpochOverError) as group:
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


async def _pause(stopping: asyncio.Event, seconds: float) -> None:
    """Sleep, but not through the order to stop."""
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        return
