"""The one global line of requests that wait for a worker.

Owns who is next. Three rules, from the strongest:

1. the system class before everybody;
2. those that ran before and lost their place before those that never ran, unless one of the latter
   is so urgent that it could take a place by force;
3. between tenants, whoever was served least (`tenants`); within one, the policy's order.

Looking for the next costs the logarithm of the number of tenants that wait, however many requests
do.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from scheduler_svc.core.policy import Policy
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_queue import RequestQueue
from scheduler_svc.core.tenants import Tenant


@dataclass(slots=True, eq=False)
class _TenantLine:
    """The requests of one tenant that wait for their first run."""

    tenant: Tenant
    queue: RequestQueue = field(default_factory=RequestQueue)
    entry: tuple[float, int] = (0.0, 0)  # its only valid entry in the heap


class WaitingLine:
    """Requests of all tenants, and who of them is next."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._system = RequestQueue()
        self._returning = RequestQueue()
        self._lines: dict[str, _TenantLine] = {}
        # (counter as it was, serial number, line). Counters only grow between two looks, so the top
        # is put right when it is looked at; an entry that is not the line's latest is void.
        self._heap: list[tuple[float, int, _TenantLine]] = []
        self._serial = 0
        self._level = 0.0  # counter of the tenant that was served last

    def __len__(self) -> int:
        fresh = sum(len(line.queue) for line in self._lines.values())
        return len(self._system) + len(self._returning) + fresh

    def __iter__(self) -> Iterator[Request]:
        yield from self._system
        yield from self._returning
        for line in self._lines.values():
            yield from line.queue

    def __bool__(self) -> bool:
        return bool(self._lines or len(self._returning) or len(self._system))

    # ------------------------------------------------------------ coming and going

    def push(self, request: Request) -> None:
        """Let a request wait."""
        if request.is_system:
            self._system.push(request)
        elif request.was_started:
            self._returning.push(request)
        else:
            self._join_line(request.tenant).queue.push(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        if request.is_system:
            self._system.remove(request)
            return
        if request.was_started:
            self._returning.remove(request)
            return
        line = self._lines[request.tenant.name]
        line.queue.remove(request)
        if not line.queue:
            del self._lines[request.tenant.name]
            line.entry = (0.0, 0)

    def served(self, tenant: Tenant) -> None:
        """A request of this tenant left the line to run; who joins now starts level with it."""
        self._level = max(self._level, tenant.virtual)

    def refunded(self, tenant: Tenant) -> None:
        """A tenant's counter went down, which the heap does not expect."""
        line = self._lines.get(tenant.name)
        if line is not None:
            self._enter(line)

    def _join_line(self, tenant: Tenant) -> _TenantLine:
        line = self._lines.get(tenant.name)
        if line is None:
            tenant.virtual = max(tenant.virtual, self._level)
            line = self._lines[tenant.name] = _TenantLine(tenant)
            self._enter(line)
        return line

    def _enter(self, line: _TenantLine) -> None:
        self._serial += 1
        line.entry = (line.tenant.virtual, self._serial)
        heappush(self._heap, (*line.entry, line))

    # ------------------------------------------------------------ who is next

    def walk(self) -> Iterator[Request]:
        """Go through the line in its order, as far as the caller wants.

        The caller may take out the request that it was given last, and no other, before it asks for
        the next. A request that it leaves counts as if it were served, for the order of the rest.
        """
        yield from list(self._system)
        returning = list(self._returning)
        fresh = self._walk_tenants()
        try:
            ahead = next(fresh, None)
            for request in returning:
                while ahead is not None and self.policy.may_preempt(ahead, request):
                    yield ahead
                    ahead = next(fresh, None)
                yield request
            while ahead is not None:
                yield ahead
                ahead = next(fresh, None)
        finally:
            fresh.close()

    def _walk_tenants(self) -> Generator[Request, None, None]:
        """Those that never ran: always of the tenant that was served least so far."""
        visited: dict[str, tuple[_TenantLine, int]] = {}  # line, requests of it that were left
        ahead: list[tuple[float, str]] = []  # the same lines, by counter with what they were given
        try:
            while True:
                line = self._least_served()
                if line is not None and line.tenant.name in visited:
                    continue  # its counter went down meanwhile; it is entered again at the end
                if ahead and (line is None or ahead[0][0] <= line.tenant.virtual):
                    if line is not None:
                        self._enter(line)
                    virtual, name = heappop(ahead)
                    line, index = visited[name]
                elif line is not None:
                    virtual, name, index = line.tenant.virtual, line.tenant.name, 0
                else:
                    return
                if index >= len(line.queue):
                    visited[name] = (line, index)
                    continue
                request = line.queue[index]
                visited[name] = (line, index)
                yield request
                was_left = index < len(line.queue) and line.queue[index] is request
                visited[name] = (line, index + was_left)
                cost = request.num_tokens / line.tenant.weight
                heappush(ahead, (max(virtual + cost, line.tenant.virtual), name))
        finally:
            for line, _ in visited.values():
                if line.queue:
                    self._enter(line)

    def _least_served(self) -> _TenantLine | None:
        """Take the line of the tenant with the lowest counter out of the heap."""
        while self._heap:
            virtual, serial, line = heappop(self._heap)
            if line.entry != (virtual, serial):
                continue  # void
            if line.tenant.virtual > virtual:
                self._enter(line)
                continue
            line.entry = (0.0, 0)
            return line
        return None
