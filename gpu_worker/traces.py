"""The worker's part of a trace: from the step that begins a request to the last one of it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from wire.messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from wire.traces import Span, TraceContext, Tracing


@dataclass(slots=True)
class _Computed:
    """A traced request that the worker holds."""

    span: Span
    first_step: int
    num_missing: int  # tokens until its known ones are computed


@dataclass(slots=True)
class _Awaited:
    """What a step that is not answered yet means for traced requests."""

    step_id: int
    begins: list[NewRequestData] = field(default_factory=list)
    catches_up: list[tuple[int, int]] = field(default_factory=list)  # request, tokens
    ends: list[int] = field(default_factory=list)


class StepTraces:
    """Follows the steps of one incarnation. Its spans are below the scheduler's for the request."""

    def __init__(self, tracing: Tracing, process: str) -> None:
        self._tracing = tracing
        self._process = process
        self._held: dict[int, _Computed] = {}
        self._coming: set[int] = set()  # that begin in a step that is not answered yet
        self._awaited: deque[_Awaited] = deque()
        self._idle_since = 0  # end of the step that was answered last, in nanoseconds

    def submitted(self, step: SchedulerOutput) -> None:
        """Take note of a step that is about to run."""
        awaited = _Awaited(step.step_id)
        if step.is_fence:
            awaited.ends = [*self._held, *self._coming]
        else:
            awaited.begins = [new for new in step.new_reqs if new.traceparent is not None]
            self._coming.update(new.req for new in awaited.begins)
            ours = self._held.keys() | self._coming
            if ours:
                cached = step.cached_reqs
                listed = zip(cached.reqs, cached.num_scheduled_tokens, strict=True)
                awaited.catches_up = [(req, n) for req, n in listed if req in ours]
                gone = (*step.finished_reqs, *step.preempted_reqs)
                awaited.ends = [req for req in gone if req in ours]
        self._awaited.append(awaited)

    def answered(self, result: ModelRunnerOutput | None) -> None:
        """Take note of the result of the oldest step that was submitted; None: it was not run."""
        if not self._awaited:  # one that nobody could read, and so the last
            return
        now_ns, awaited = time.time_ns(), self._awaited.popleft()
        if result is None:
            self._coming.difference_update(new.req for new in awaited.begins)
            return
        begin_ns = max(now_ns - result.device_us * 1000, self._idle_since)
        for req in awaited.ends:
            self._end(req, awaited.step_id, self._idle_since or begin_ns)
        for new in awaited.begins:
            self._begin(new, awaited.step_id, begin_ns)
            self._catch_up(new.req, new.num_scheduled_tokens, now_ns)
        for req, num_tokens in awaited.catches_up:
            self._catch_up(req, num_tokens, now_ns)
        self._idle_since = now_ns

    def close(self) -> None:
        """The incarnation is over: whatever it held goes on elsewhere."""
        for req in list(self._held):
            self._held[req].span.error = "incarnation_ended"
            self._end(req, 0, time.time_ns())

    # ------------------------------------------------------------ inside

    def _begin(self, new: NewRequestData, step_id: int, begin_ns: int) -> None:
        self._coming.discard(new.req)
        parent = TraceContext.parse(new.traceparent)
        if parent is None:
            return
        parent = parent.child("request")  # as the scheduler calls its span
        num_known = len(new.prompt_token_ids) + len(new.output_token_ids)
        span = Span(
            "compute",
            parent.child("compute", self._process, step_id),
            parent,
            begin_ns,
            {
                "pagestream.worker": self._process,
                "pagestream.num_cached_tokens": new.num_computed_tokens,
                "pagestream.num_tokens": num_known,
            },
        )
        self._held[new.req] = _Computed(span, step_id, num_known - new.num_computed_tokens)

    def _catch_up(self, req: int, num_tokens: int, now_ns: int) -> None:
        one = self._held.get(req)
        if one is None or one.num_missing <= 0:
            return
        one.num_missing -= num_tokens
        if one.num_missing <= 0:
            one.span.event("prefill_done", now_ns)

    def _end(self, req: int, step_id: int, end_ns: int) -> None:
        self._coming.discard(req)
        if (one := self._held.pop(req, None)) is None:
            return
        if step_id > one.first_step:
            one.span.attributes["pagestream.num_steps"] = step_id - one.first_step
        self._tracing.end(one.span, end_ns)
