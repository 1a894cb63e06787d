"""Everything the core remembers, in one place, for the verbs and the planner to share."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.outputs import Outputs, Totals
from scheduler_svc.core.policy import Policy, policy_of
from scheduler_svc.core.request import Request
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.core.waiting_line import WaitingLine


@dataclass(slots=True)
class State:
    """Requests, workers, and the counters that outlive them."""

    config: SchedulerConfig
    epoch: int
    policy: Policy
    waiting: WaitingLine
    requests: dict[int, Request] = field(default_factory=dict)  # that have not ended
    lanes: dict[str, Lane] = field(default_factory=dict)
    tenants: Tenants = field(default_factory=Tenants)
    totals: Totals = field(default_factory=Totals)
    outputs: Outputs = field(default_factory=Outputs)

    @classmethod
    def new(cls, config: SchedulerConfig, epoch: int) -> State:
        """Begin with nothing."""
        policy = policy_of(config)
        return cls(config, epoch, policy, WaitingLine(policy))

    def take_back(self, request: Request) -> None:
        """Let a request wait that lost what was computed for it; its tenant gets that back."""
        lost = min(request.num_computed_tokens, request.num_tokens)
        self.totals.num_recomputed_tokens += lost
        request.tenant.charge(-lost)
        self.waiting.push(request)
        self.waiting.refunded(request.tenant)

    def unbind(self, request: Request) -> None:
        """A request no longer waits for room on one worker."""
        for lane in self.lanes.values():
            if lane.bound is request:
                lane.bound = None
