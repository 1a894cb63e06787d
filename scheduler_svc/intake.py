"""What comes in on `requests`: submissions, and wishes about what was submitted before.

Owns what each of them does to the core and to the ledger. Awaits nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping

import structlog

from scheduler_svc.chronicle import Chronicle
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.ledger import Ledger
from scheduler_svc.live_config import LiveConfig, core_config
from scheduler_svc.recovery import Control, Submission
from scheduler_svc.traces import RequestTraces
from scheduler_svc.worker_link import WorkerLink
from wire.config import Settings
from wire.keys import arrival_ms, entry_id, request_number
from wire.messages import AbortRequest, ConfigChange, EngineCoreRequest, ResumeRequest, crc_of

log = structlog.get_logger()


class Intake:
    """The door of one leader."""

    def __init__(
        self,
        scheduler: Scheduler,
        ledger: Ledger,
        live: LiveConfig,
        chronicle: Chronicle,
        *,
        collect: Callable[[], None],
        links: Callable[[], list[WorkerLink]],
        traces: RequestTraces | None = None,
    ) -> None:
        """`collect` hands the core's outputs to the ledger; `links` are the workers there are."""
        self._scheduler = scheduler
        self._ledger = ledger
        self._live = live
        self._chronicle = chronicle
        self._collect = collect
        self._traces = traces
        self._links = links

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._live.settings

    @property
    def limits(self) -> dict[str, str]:
        """Those that can be changed while running, as people write them."""
        return self._live.limits

    def restore(self, config: dict[str, str]) -> None:
        """Go on with the settings that were changed under an earlier leader."""
        self._live = LiveConfig(self._live.settings, config)
        self._reconfigure()

    def take(self, entry: str, message: Submission) -> None:
        """Apply one entry of `requests`."""
        if isinstance(message, EngineCoreRequest):
            self.add(request_number(entry), message)
        else:
            self.control(entry, message)

    def add(self, req: int, request: EngineCoreRequest, num_saved: int = 0) -> None:
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
            if self._traces is not None:
                self._traces.drop(before)
            self._ledger.drop(before)
            self._scheduler.abort_request(before)
            self._scheduler.take_outputs()  # its end is nobody's business
        self._ledger.track(req, request, num_saved)
        self._scheduler.add_request(req, request, arrival_ms(req) / 1000)
        if self._traces is not None:
            self._traces.begin(req, request)

    def control(self, entry: str, control: Control) -> None:
        """Do what a gateway or an operator asks for."""
        match control:
            case ResumeRequest():
                self._resume(self._ledger.number(control.req_id), control)
            case AbortRequest():
                req = self._ledger.number(control.req_id)
                if req is not None:
                    self._scheduler.abort_request(req, control.reason, control.num_output_tokens)
            case ConfigChange():
                outcome = self._live.apply(control, self._links())
                self._ledger.note_config(outcome)
                self._reconfigure()
                self._tell(control, outcome)
                if control.reset_prefix_cache and not outcome["refused"]:
                    self._scheduler.reset_prefix_cache()
        self._ledger.control_done(entry)

    # ------------------------------------------------------------ inside

    def _covers(self, req: int, request: EngineCoreRequest) -> bool:
        prefix = request.output_token_ids
        return self._output(req)[: len(prefix)] == prefix

    def _output(self, req: int) -> array[int]:
        return self._scheduler.requests[req].output_token_ids

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

    def _tell(self, change: ConfigChange, outcome: Mapping[str, str | int]) -> None:
        changed = [f"{n}={v}" for n, v in zip(change.names, change.values, strict=False)]
        if change.reset_prefix_cache:
            changed.append("the prefix cache was emptied")
        if changed and not outcome["refused"]:
            self._chronicle.note("settings_changed", "", ", ".join(changed))

    def _reconfigure(self) -> None:
        config = core_config(self._live.settings, self._live.version)
        if config != self._scheduler.config:
            self._scheduler.reconfigure(config)
            log.info("reconfigured", version=self._live.version)
