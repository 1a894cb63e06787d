"""What requests went through, in Redis, for people. Part of the mirror: nothing relies on it.

Owns what was written of each request, and writes only what changed since.
"""

from __future__ import annotations

import asyncio

from scheduler_svc.chronicle import Chronicle, Command, in_parts
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from wire.keys import Keys, arrival_ms
from wire.life import LifeLine

ENDED_LENGTH = 128
"""Ended requests kept in Redis."""

MAX_ENDED = 32
"""Ended requests written each time, the latest ones."""

MAX_PREEMPTIONS = 8
"""Preemptions told one by one each time."""

AT_ONCE = 256
"""Requests looked at before the steps get their turn."""

Seen = tuple[int, int, str]  # tokens, phases, last phase: what makes its line another


class Lives:
    """The lives of the requests of one leader."""

    def __init__(self, keys: Keys, chronicle: Chronicle) -> None:
        self._keys = keys
        self._chronicle = chronicle
        self._written: dict[str, Seen] = {}
        self._num_preemptions: dict[int, int] = {}

    @property
    def key(self) -> str:
        """Where those are that have not ended."""
        return self._keys.life()

    def forget(self) -> None:
        """Nothing stands in Redis any more."""
        self._written.clear()

    async def compare(self, commands: list[Command], scheduler: Scheduler) -> None:
        """Add what brings Redis up to date; steps may be sent meanwhile."""
        requests = list(scheduler.requests.values())
        changed: list[str | int] = []
        alive = set()
        for number, request in enumerate(requests):
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            alive.add(request.req_id)
            seen = (request.num_tokens, len(request.life.phases), request.life.phases[-1][0])
            if self._written.get(request.req_id) != seen and (line := _line(request)):
                self._written[request.req_id] = seen
                changed += (request.req_id, line)
        gone = sorted(self._written.keys() - alive)
        for req_id in gone:
            del self._written[req_id]
        commands += in_parts(("HDEL", self.key), gone)
        commands += in_parts(("HSET", self.key), changed)
        self._tell_ends(commands, scheduler)
        self._tell_preemptions(requests)

    def _tell_ends(self, commands: list[Command], scheduler: Scheduler) -> None:
        for one in scheduler.take_ended()[-MAX_ENDED:]:
            request, end = one.request, one.end
            if not (line := _line(request, end.num_output_tokens)):
                continue
            lived_ms = max(0, round((one.at - request.arrival) * 1000))
            words = ("id", request.req_id, "life", line, "ms", lived_ms)
            head: Command = ("XADD", self._keys.ended(), "MAXLEN", ENDED_LENGTH, "*")
            commands.append((*head, *words, "reason", end.finish_reason))
            if end.finish_reason == "error":
                said = end.error or "it went wrong"
                self._chronicle.note("failed", request.req_id, said, request.tenant.name)

    def _tell_preemptions(self, requests: list[Request]) -> None:
        """Tell whose blocks were taken away since the last time; not of those of lost workers."""
        before, now, num_told = self._num_preemptions, {}, 0
        for request in requests:
            if not request.num_preemptions:
                continue
            now[request.num] = request.num_preemptions
            if request.num_preemptions <= before.get(request.num, 0):
                continue
            kind = next((p for p, _ in reversed(request.life.phases) if p in _AWAY), None)
            if kind is None or kind == "lost":
                continue
            num_told += 1
            if num_told > MAX_PREEMPTIONS:
                continue
            if kind == "swapped":
                says = "its blocks are copied to the CPU pool"
                self._chronicle.note("swapped", request.req_id, says, request.tenant.name)
            else:
                says = "its blocks are given up and computed again"
                self._chronicle.note("preempted", request.req_id, says, request.tenant.name)
        if num_told > MAX_PREEMPTIONS:
            self._chronicle.note("preempted", "", f"{num_told - MAX_PREEMPTIONS} more requests")
        self._num_preemptions = now


_AWAY = frozenset({"preempted", "swapped", "lost"})


def _line(request: Request, num_output_tokens: int | None = None) -> str:
    """What the request went through; empty if it has a name that does not go into a line."""
    arrival = request.arrival
    phases = ",".join(
        f"{phase}:{max(0, round((at - arrival) * 1000))}" for phase, at in request.life.phases
    )
    known = request.num_output_tokens if num_output_tokens is None else num_output_tokens
    line = LifeLine(
        tenant=request.tenant.name,
        worker=(request.worker or "").rpartition(".")[0],
        priority=request.priority,
        prompt=request.num_prompt_tokens,
        output=known,
        preemptions=request.num_preemptions,
        arrival_ms=arrival_ms(request.num),
        phases=phases,
    )
    try:
        return line.text()
    except ValueError:
        return ""
