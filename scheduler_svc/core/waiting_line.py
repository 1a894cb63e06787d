"""The one global line of requests that wait for a worker.

Owns who is next. Three rules, from the strongest:

1. the system class before everybody;
2. between tenants, whoever was served least (`tenants`);
3. within a tenant, those that ran before and lost their place before those that never ran, unless
   one of the latter is so urgent that it could take a place by force; else the policy's order.

Looking for the next costs the logarithm of the number of tenants that wait, however many requests
do.

A request that another worker suits better than the one whose step is planned is *promised* to it:
it leaves the line, so that nobody walks past it again, until that worker plans its next step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from scheduler_svc.core.policy import Policy
from scheduler_svc.core.request import Request
from scheduler_svc.core.request_queue import RequestQueue
from scheduler_svc.core.tenants import Tenant, Tenants


@dataclass(slots=True, eq=False)
class _TenantLine:
    """The requests of one tenant that wait."""

    tenant: Tenant
    returning: RequestQueue = field(default_factory=RequestQueue)
    fresh: RequestQueue = field(default_factory=RequestQueue)
    entry: int = 0  # number of its valid entry in the heap; 0: none, -1: a walk has taken it out

    def __bool__(self) -> bool:
        return bool(len(self.returning) or len(self.fresh))


@dataclass(slots=True, eq=False)
class _Cursor:
    """How far a walk has come in one tenant's line: past those that it left there."""

    line: _TenantLine
    virtual: float  # the tenant's counter, as if all that was seen had been served
    num_returning: int = 0
    num_fresh: int = 0

    def peek(self, policy: Policy) -> Request | None:
        """Give the next of the line."""
        returning, fresh = self.line.returning, self.line.fresh
        back = returning[self.num_returning] if self.num_returning < len(returning) else None
        new = fresh[self.num_fresh] if self.num_fresh < len(fresh) else None
        if back is None or (new is not None and policy.may_preempt(new, back)):
            return new
        return back

    def pass_by(self, request: Request) -> None:
        """Go on behind a request, whether it was taken out of the line or left in it."""
        self.virtual += request.num_tokens / self.line.tenant.weight
        returning, fresh = self.line.returning, self.line.fresh
        if self.num_fresh < len(fresh) and fresh[self.num_fresh] is request:
            self.num_fresh += 1
        elif self.num_returning < len(returning) and returning[self.num_returning] is request:
            self.num_returning += 1


@dataclass(slots=True)
class _Promise:
    """The requests that one worker may take in its next step before anybody else."""

    since: float  # when the first of them was promised, in seconds
    requests: RequestQueue = field(default_factory=RequestQueue)


class WaitingLine:
    """Requests of all tenants, and who of them is next."""

    def __init__(self, policy: Policy, tenants: Tenants, credit: int) -> None:
        self.policy = policy
        self._tenants = tenants
        self._credit = credit  # tokens; see `Tenants.line_up`
        self._system = RequestQueue()
        self._lines: dict[str, _TenantLine] = {}
        self._promises: dict[str, _Promise] = {}  # by worker
        # (counter as it was, number of the entry, line). Counters mostly grow, so the top is put
        # right when it is looked at; an entry that is not the line's latest is void.
        self._heap: list[tuple[float, int, _TenantLine]] = []
        self._num_entries = 0
        self._num_in_lines = 0
        self._num_promised = 0

    def __len__(self) -> int:
        return len(self._system) + self._num_in_lines + self._num_promised

    def __iter__(self) -> Iterator[Request]:
        yield from self._system
        for line in self._lines.values():
            yield from line.returning
            yield from line.fresh
        for promise in self._promises.values():
            yield from promise.requests

    # ------------------------------------------------------------ coming and going

    def push(self, request: Request) -> None:
        """Let a request wait."""
        if not request.is_system and request.tenant.name not in self._lines:
            self._tenants.line_up(request.tenant, self._credit)
        request.promised_to = None
        self._stand(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        if request.promised_to is None:
            self._step_out(request)
            return
        promise = self._promises[request.promised_to]
        promise.requests.remove(request)
        self._num_promised -= 1
        if not len(promise.requests):
            del self._promises[request.promised_to]
        request.promised_to = None

    def _stand(self, request: Request) -> None:
        """Put a request at its place in the line."""
        if request.is_system:
            self._system.push(request)
            return
        line = self._lines.get(request.tenant.name)
        if line is None:
            line = self._lines[request.tenant.name] = _TenantLine(request.tenant)
            self._enter(line)
        (line.returning if request.was_started else line.fresh).push(request)
        self._num_in_lines += 1

    def _step_out(self, request: Request) -> None:
        if request.is_system:
            self._system.remove(request)
            return
        line = self._lines[request.tenant.name]
        (line.returning if request.was_started else line.fresh).remove(request)
        self._num_in_lines -= 1
        if not line:
            del self._lines[request.tenant.name]
            line.entry = 0

    def refunded(self, tenant: Tenant) -> None:
        """A tenant's counter went down, which the heap does not expect."""
        line = self._lines.get(tenant.name)
        if line is not None and line.entry > 0:
            self._enter(line)

    # ------------------------------------------------------------ promised to a worker

    def promise(self, request: Request, worker: str, now: float) -> None:
        """Keep a request of the line for a worker, until that one plans its next step."""
        self._step_out(request)
        request.promised_to = worker
        if worker not in self._promises:
            self._promises[worker] = _Promise(now)
        self._promises[worker].requests.push(request)
        self._num_promised += 1

    def redeem(self, worker: str) -> list[Request]:
        """Put all that were promised to a worker back at their places; gives them."""
        promise = self._promises.pop(worker, None)
        if promise is None:
            return []
        self._num_promised -= len(promise.requests)
        for request in promise.requests:
            request.promised_to = None
            self._stand(request)
        return list(promise.requests)

    def late(self, before: float) -> list[str]:
        """Workers that have left a promise from before this time where it is."""
        return [worker for worker, one in self._promises.items() if one.since < before]

    # ------------------------------------------------------------ who is next

    def first(self) -> Request | None:
        """Who is next."""
        walk = self.walk()
        try:
            return next(walk, None)
        finally:
            walk.close()

    def walk(self) -> Generator[Request, None, None]:
        """Go through the line in its order, as far as the caller wants.

        The caller may take out the request that it was given last, and no other, before it asks for
        the next. A request that it leaves counts as if it were served, for the order of the rest.
        """
        yield from list(self._system)
        cursors: list[_Cursor] = []
        seen: list[tuple[float, int, _Cursor]] = []  # heap of them, by counter
        try:
            while True:
                lowest = self._lowest_counter()
                if seen and (lowest is None or seen[0][0] <= lowest):
                    _, number, cursor = heappop(seen)
                elif lowest is not None:
                    line = heappop(self._heap)[2]
                    line.entry = -1
                    number, cursor = len(cursors), _Cursor(line, line.tenant.virtual)
                    cursors.append(cursor)
                else:
                    return
                request = cursor.peek(self.policy)
                if request is not None:
                    yield request
                    cursor.pass_by(request)
                    heappush(seen, (cursor.virtual, number, cursor))
        finally:
            for cursor in cursors:
                if cursor.line:
                    self._enter(cursor.line)

    def _lowest_counter(self) -> float | None:
        """Put the top of the heap right, and say what it is."""
        while self._heap:
            virtual, number, line = self._heap[0]
            if line.entry == number and line.tenant.virtual == virtual:
                return virtual
            heappop(self._heap)
            if line.entry == number:
                self._enter(line)
        return None

    def _enter(self, line: _TenantLine) -> None:
        self._num_entries += 1
        line.entry = self._num_entries
        heappush(self._heap, (line.tenant.virtual, line.entry, line))
