"""Who makes way for a waiting request that a worker has no room for.

Owns the judgement, holds no state. Two claims are good for somebody else's place:

- the policy's: the request is strictly more urgent;
- the tenant's: it was served less than the other, by more than a quarter of what a step can
  compute, and holds less of the worker. Both must still be true after the exchange, so that no two
  tenants ever take each other's places in turn.

The counters say who is next, but nobody is next while one who came before holds all seats for
minutes: that is what the second is for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.placement import could_ever_fit, num_needed
from scheduler_svc.core.policy import Policy
from scheduler_svc.core.request import Request
from scheduler_svc.core.tenants import Tenant


def victims_for(
    request: Request,
    lane: Lane,
    config: SchedulerConfig,
    policy: Policy,
    is_allowed: Callable[[Request], bool],
) -> list[Request]:
    """Choose who makes way, newest first; nobody if even that would not make room and a seat."""
    running = lane.running
    if len(running) == 0 or request.is_suspect or not could_ever_fit(request, lane):
        return []
    margin = config.max_num_batched_tokens / 4
    is_urgent = policy.may_preempt(request, running[-1])
    if not is_urgent and not _is_owed(request.tenant, lane, margin):
        return []
    hits = lane.kv.get_computed_blocks(request)
    needed, room = num_needed(request, lane, hits, config), lane.kv.pool.num_free
    claim = _Claim(request.tenant, lane, config, needed)
    victims: list[Request] = []
    for victim in reversed(running):
        if not is_allowed(victim):
            continue
        if not policy.may_preempt(request, victim):
            if victim is running[0] or not claim.is_good_for(victim, margin):
                continue
            claim.exchange(victim)
        victims.append(victim)
        own = set(victim.block_ids).difference(hits)
        room += sum(lane.kv.pool.num_holders(block) == 1 for block in own)
        if needed <= room:
            return victims
    return []


def _is_owed(tenant: Tenant, lane: Lane, margin: float) -> bool:
    """Whether anybody who runs there was served so much more than this tenant."""
    limit = tenant.virtual + margin / tenant.weight
    return any(other.virtual > limit for other in lane.running_of if other is not tenant)


class _Claim:
    """What a tenant would hold of a worker, and what the others would keep."""

    def __init__(self, tenant: Tenant, lane: Lane, config: SchedulerConfig, needed: int) -> None:
        self._tenant = tenant
        self._lane = lane
        self._num_seats, self._num_blocks = config.max_num_seqs, lane.capacity.num_blocks
        self._loses_tokens = needed > lane.kv.pool.num_free  # else they stay in the prefix cache
        self._seats = Counter(lane.running_of)
        self._blocks: Counter[Tenant] = Counter()
        self._lost: Counter[Tenant] = Counter()  # tokens that will not count as served any more
        for request in lane.running:
            self._blocks[request.tenant] += len(request.block_ids)
        self._seats[tenant] += 1
        self._blocks[tenant] += needed

    def is_good_for(self, victim: Request, margin: float) -> bool:
        """Whether the exchange leaves the other served more, and holding no less."""
        other, tenant = victim.tenant, self._tenant
        if other is tenant:
            return False
        lost = self._lost[other] + self._loss(victim)
        owed = other.virtual - lost / other.weight - tenant.virtual
        left = self._share(other, seats=1, blocks=len(victim.block_ids))
        return owed > margin / tenant.weight and self._share(tenant) <= left

    def exchange(self, victim: Request) -> None:
        """Count a victim as gone."""
        self._seats[victim.tenant] -= 1
        self._blocks[victim.tenant] -= len(victim.block_ids)
        self._lost[victim.tenant] += self._loss(victim)

    def _loss(self, victim: Request) -> int:
        return self._lane.num_computed_tokens(victim) if self._loses_tokens else 0

    def _share(self, tenant: Tenant, seats: int = 0, blocks: int = 0) -> float:
        """Larger of a tenant's shares of seats and blocks without these, divided by its weight."""
        of_seats = (self._seats[tenant] - seats) / self._num_seats
        of_blocks = (self._blocks[tenant] - blocks) / self._num_blocks
        return max(of_seats, of_blocks) / tenant.weight
