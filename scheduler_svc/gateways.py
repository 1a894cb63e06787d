"""The gateways that follow requests: tells them what is held, and notices when one is gone.

Owns the judgement that a gateway is gone. Its requests are ended, since nobody reads them any more;
those whose client asked to be able to come back run on for a while.
"""

from __future__ import annotations

import time
from asyncio import sleep
from typing import NoReturn

import structlog

from scheduler_svc.chronicle import Chronicle
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.ledger import Ledger
from scheduler_svc.worker_link import process_of
from wire.bus import Bus, BusDownError
from wire.config import Settings
from wire.service import HEARTBEAT_S

log = structlog.get_logger()

SILENCE_S = 5.0
"""A gateway that was not heard for so long is gone, and with it the connections of its clients."""

REPORT_S = 1.0
"""How often each gateway is told what is held for it."""


class Gateways:
    """The gateways of one leader."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        scheduler: Scheduler,
        ledger: Ledger,
        *,
        chronicle: Chronicle,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._scheduler = scheduler
        self._ledger = ledger
        self._chronicle = chronicle
        self._known: dict[str, str] | None = None  # what each gateway said of itself last
        self._last_heard: dict[str, float] = {}
        self._last_report = 0.0

    async def watch(self) -> NoReturn:
        """Look at the heartbeats, over and over."""
        while True:
            now = time.monotonic()
            try:
                fields_of = await self._bus.processes("gateway")
            except BusDownError:
                self.forgive_silence()
            else:
                alive = {process_of(name, fields) for name, fields in fields_of.items() if fields}
                self._tell(
                    {name: said["state"] for name, said in fields_of.items() if "state" in said}
                )
                self._release_orphans(alive, now)
                if now - self._last_report >= REPORT_S:
                    self._last_report = now
                    self._ledger.report(alive)
            await sleep(HEARTBEAT_S)

    def _tell(self, states: dict[str, str]) -> None:
        """Tell of those that came, went or take no more requests; not of those found at first."""
        before, self._known = self._known, states
        if before is None:
            return
        for name, state in states.items():
            if name not in before:
                self._chronicle.note("gateway_joined", name)
            elif state == "draining" and before[name] != state:
                self._chronicle.note("gateway_draining", name, "it takes no more requests")
        for name in before.keys() - states.keys():
            self._chronicle.note("gateway_left", name)

    def forgive_silence(self) -> None:
        """Nobody could be heard for a while: that is no gateway's fault."""
        self._last_heard.clear()

    def _release_orphans(self, alive: set[str], now: float) -> None:
        followers = self._ledger.followers()
        self._last_heard = {one: self._last_heard.get(one, now) for one in followers}
        self._last_heard |= dict.fromkeys(alive, now)
        for gateway in sorted(followers - alive):
            silence = now - self._last_heard[gateway]
            if silence >= SILENCE_S:
                self._leave(gateway, silence)

    def _leave(self, gateway: str, silence: float) -> None:
        """End what a silent gateway follows alone, as far as no client may come back for it."""
        for req in self._ledger.followed_by(gateway):
            if self._ledger.is_resumable(req) and silence < self._settings.orphan_grace_s:
                continue
            if self._ledger.unfollow(req, gateway):
                self._scheduler.abort_request(req)
                log.info("orphan_ended", gateway=gateway, req_id=self._ledger.req_id(req))
