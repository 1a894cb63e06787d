"""The scheduler's part of a trace: where each request spends its time.

    request  ├─ queue ─┼─ prefill ─┼── decode ──┼─ preempted ─┼─ prefill ─┼── decode ──┤

Follows the steps that are sent and the outputs that come of them; decides nothing, and the core
knows nothing of it but that a request has a `traceparent`. Times are the Redis server's.

A new leader goes on with the span `request` of the one before, whose id it can tell; the stretch
that was open when that died is lost, and the next one begins where this leader took over, marked
`recovered`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler_svc.core.outputs import Finished, Outputs
from scheduler_svc.core.request import Request, RequestStatus
from scheduler_svc.core.scheduler import Scheduler
from wire.keys import arrival_ms
from wire.messages import EngineCoreRequest, SchedulerOutput
from wire.traces import Span, TraceContext, Tracing, Value


@dataclass(slots=True)
class _Followed:
    """A request that is traced, and the stretch that it is in."""

    whole: Span
    stretch: Span
    num_stretches: int = 1


class RequestTraces:
    """Traces the requests of one epoch."""

    def __init__(
        self, tracing: Tracing, scheduler: Scheduler, epoch: int, now: Callable[[], float]
    ) -> None:
        self.is_recovering = True  # what begins now was there before
        self._tracing = tracing
        self._scheduler = scheduler
        self._epoch = epoch
        self._now = now
        self._followed: dict[int, _Followed] = {}
        self._prefilling: set[int] = set()  # those whose next token ends a stretch

    def begin(self, req: int, request: EngineCoreRequest) -> None:
        """Follow a request, if its gateway wants that."""
        parent = TraceContext.parse(request.traceparent)
        if parent is None or req not in self._scheduler.requests:
            return
        arrival_ns = arrival_ms(req) * 1_000_000
        facts: dict[str, Value] = {
            "pagestream.request_id": request.req_id,
            "pagestream.epoch": self._epoch,
            "pagestream.priority": request.priority,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        }
        whole = Span("request", parent.child("request"), parent, arrival_ns, facts)
        start_ns = self._now_ns() if request.output_token_ids else arrival_ns
        if self.is_recovering:
            whole.event("recovered", self._now_ns(), **{"pagestream.epoch": self._epoch})
        stretch = self._stretch(whole, 1, "queue", start_ns)
        self._followed[req] = _Followed(whole, stretch)

    def drop(self, req: int) -> None:
        """Follow a request no longer: another submission has taken its place."""
        if (one := self._followed.get(req)) is not None:
            self._end(req, one, "superseded", self._now_ns())

    def stepped(self, process: str, step: SchedulerOutput) -> None:
        """See who runs from this step on, and who does not any more."""
        now_ns = self._now_ns()
        for num in step.preempted_reqs:
            if (one := self._followed.get(num)) is not None:
                is_swapped = self._is_swapped(num)
                self._preempted(num, one, now_ns, "swap" if is_swapped else "recompute")
        for new in step.new_reqs:
            if (one := self._followed.get(new.req)) is not None:
                self._next(one, "prefill", now_ns)
                self._prefilling.add(new.req)
                one.stretch.attributes |= {
                    "pagestream.worker": process,
                    "pagestream.num_cached_tokens": new.num_computed_tokens,
                    "pagestream.num_output_tokens": len(new.output_token_ids),
                }

    def lost(self, process: str) -> None:
        """See who ran on a worker that is being given up."""
        now_ns, lane = self._now_ns(), self._scheduler.lanes[process]
        running: Iterable[Request] = [*lane.running, *lane.ending.values()]
        for request in running:
            if (one := self._followed.get(request.num)) is not None:
                one.stretch.error = "worker_lost"
                self._preempted(request.num, one, now_ns, "worker_lost")

    def collected(self, outputs: Outputs) -> None:
        """See whose first token there is, and who has ended."""
        now_ns = self._now_ns()
        if self._prefilling:
            for req in self._prefilling.intersection(outputs.reqs):
                self._prefilling.discard(req)
                self._next(self._followed[req], "decode", now_ns)
        for finished in outputs.finished:
            if (one := self._followed.get(finished.req)) is not None:
                self._finished(one, finished)
                self._end(finished.req, one, finished.finish_reason, now_ns)

    # ------------------------------------------------------------ inside

    def _preempted(self, req: int, one: _Followed, now_ns: int, mode: str) -> None:
        one.whole.event("preempted", now_ns, **{"pagestream.preemption_mode": mode})
        self._prefilling.discard(req)
        self._next(one, "preempted", now_ns)
        one.stretch.attributes["pagestream.preemption_mode"] = mode

    def _finished(self, one: _Followed, finished: Finished) -> None:
        one.whole.attributes["gen_ai.usage.output_tokens"] = finished.num_output_tokens
        one.whole.attributes["pagestream.num_preemptions"] = finished.num_preemptions
        if finished.finish_reason == "error":
            one.whole.error = finished.error_code or "internal"

    def _end(self, req: int, one: _Followed, reason: str, now_ns: int) -> None:
        del self._followed[req]
        self._prefilling.discard(req)
        self._tracing.end(one.stretch, now_ns)
        one.whole.attributes["gen_ai.response.finish_reasons"] = [reason]
        self._tracing.end(one.whole, now_ns)

    def _next(self, one: _Followed, name: str, now_ns: int) -> None:
        self._tracing.end(one.stretch, now_ns)
        one.num_stretches += 1
        start_ns = max(now_ns, one.stretch.start_ns)
        one.stretch = self._stretch(one.whole, one.num_stretches, name, start_ns)

    def _stretch(self, whole: Span, number: int, name: str, start_ns: int) -> Span:
        facts: dict[str, Value] = {"pagestream.epoch": self._epoch}
        if self.is_recovering:
            facts["pagestream.recovered"] = True
        context = whole.context.child(name, self._epoch, number)
        return Span(name, context, whole.context, start_ns, facts)

    def _is_swapped(self, num: int) -> bool:
        request = self._scheduler.requests.get(num)
        return request is not None and request.status is RequestStatus.SWAPPED

    def _now_ns(self) -> int:
        return round(self._now() * 1e9)
