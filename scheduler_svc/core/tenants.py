"""Who has been served how much: the counters behind weighted fairness between tenants.

Owns a virtual counter per tenant: tokens served, divided by the tenant's weight. Whoever has the
lowest goes next. A tenant that comes back from a pause starts level with the others but for a small
credit, so that nobody saves up a claim while asking for nothing. (Virtual Token Counter: Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024; the start rule is that of start-time
fair queueing.)
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_IDLE_TENANTS = 10_000
"""Counters kept of tenants that ask for nothing; the oldest are forgotten first."""


@dataclass(slots=True, eq=False)
class Tenant:
    """One tenant's counter."""

    name: str
    weight: float = 1.0
    virtual: float = 0.0  # tokens served, divided by the weight
    num_requests: int = 0  # that have not ended
    mean_output: float = 0.0  # tokens per request, of those that ended lately; 0: none did

    def note_output(self, num_tokens: int) -> None:
        """Learn how long this tenant's answers are (a mean that halves its memory in 7 answers)."""
        share = 0.1 if self.mean_output else 1.0
        self.mean_output += share * (num_tokens - self.mean_output)


class Tenants:
    """All tenants that were heard of."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._level = 0.0  # highest counter with which a tenant's request was admitted
        self._changed: dict[str, Tenant] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def join(self, name: str, weight: float) -> Tenant:
        """One more request of a tenant; its latest weight counts from now on."""
        tenant = self._tenants.pop(name, None) or Tenant(name)
        self._tenants[name] = tenant  # the dictionary is in order of last use
        tenant.weight = weight
        tenant.num_requests += 1
        if len(self._tenants) > MAX_IDLE_TENANTS:
            self._forget_one()
        return tenant

    # ------------------------------------------------------------ counting

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Count tokens as served; a negative number takes them back."""
        tenant.virtual += num_tokens / tenant.weight
        self._changed[tenant.name] = tenant

    def line_up(self, tenant: Tenant, credit: int) -> None:
        """A tenant of whom nobody waited begins to wait: about level with those who did.

        Up to `credit` tokens by which it was served less are not forgotten, so that one who asks
        for less than its share is served at once, and not each time after all the others.
        """
        tenant.virtual = max(tenant.virtual, self._level - credit / tenant.weight)

    def admitted(self, tenant: Tenant) -> None:
        """A request of this tenant begins to run; who lines up from now on starts level with it."""
        self._level = max(self._level, tenant.virtual)

    # ------------------------------------------------------------ to be kept

    def served(self) -> dict[str, float]:
        """The counters, by tenant."""
        return {name: tenant.virtual for name, tenant in self._tenants.items()}

    def take_changes(self) -> dict[str, float]:
        """The counters of those that were served since the last time."""
        changed, self._changed = self._changed, {}
        return {name: tenant.virtual for name, tenant in changed.items()}

    def restore(self, served: dict[str, float]) -> None:
        """Go on from counters that were saved, before the first request."""
        for name, virtual in served.items():
            self._tenants[name] = Tenant(name, virtual=virtual)
            self._level = max(self._level, virtual)

    def _forget_one(self) -> None:
        for name, tenant in self._tenants.items():
            if tenant.num_requests == 0:
                del self._tenants[name]
                return
