"""Everything the core remembers, in one place, for the verbs and the planner to share."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.outputs import Finished, Outputs, Totals
from scheduler_svc.core.policy import Policy, policy_of
from scheduler_svc.core.request import Order, Request
from scheduler_svc.core.tenants import Tenant, Tenants
from scheduler_svc.core.waiting_line import WaitingLine

MAX_ENDED = 256
"""Requests that have ended and that nobody has asked for yet; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended, for people who look."""

    request: Request
    end: Finished
    at: float  # seconds, server time


@dataclass(slots=True)
class State:
    """Requests, workers, and the counters that outlive them."""

    config: SchedulerConfig
    epoch: int
    policy: Policy
    tenants: Tenants
    waiting: WaitingLine
    requests: dict[int, Request] = field(default_factory=dict)  # that have not ended
    lanes: dict[str, Lane] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    outputs: Outputs = field(default_factory=Outputs)
    longest: int = 0  # sequence that fitted any worker so far, in tokens
    told_at: float = 0.0  # seconds of server time, as a call has told it last
    now: float = 0.0  # the same, newer; only for what is shown to people
    ended: deque[Ended] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))  # lately

    @classmethod
    def new(cls, config: SchedulerConfig, epoch: int) -> State:
        """Begin with nothing."""
        policy, tenants = policy_of(config), Tenants()
        return cls(config, epoch, policy, tenants, new_line(policy, tenants, config))

    def reconfigure(self, config: SchedulerConfig) -> list[Request]:
        """Change limits and policy; gives back those that wait, who have yet to line up anew."""
        waiting = list(self.waiting)
        self.config, self.policy = config, policy_of(config)
        self.waiting = new_line(self.policy, self.tenants, config)
        return waiting

    def charge(self, tenant: Tenant, num_tokens: int) -> None:
        """Count tokens as served; a negative number takes them back."""
        self.tenants.charge(tenant, num_tokens)
        if num_tokens < 0:
            self.waiting.refunded(tenant)

    def order_of(self, request: Request) -> Order:
        """Place of a request in the one total order, from now until the policy changes."""
        num_cached = 0
        if self.config.policy == "sjf":
            num_cached = max(
                (
                    len(lane.kv.get_computed_blocks(request)) * lane.capacity.block_size
                    for lane in self.lanes.values()
                ),
                default=0,
            )
        return 0 if request.is_system else 1, self.policy.rank(request, num_cached), request.num

    def unbind(self, request: Request) -> None:
        """A request no longer waits for room on one worker."""
        for lane in self.lanes.values():
            if lane.bound is request:
                lane.bound = None


def new_line(policy: Policy, tenants: Tenants, config: SchedulerConfig) -> WaitingLine:
    """Make an empty line; a tenant's credit is what one step can compute."""
    return WaitingLine(policy, tenants, config.max_num_batched_tokens)
