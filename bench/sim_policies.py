"""The same requests under every policy: who waits how long, and how busy the workers are.

Owns the workload by which policies are compared: people in a chat, with a system prompt in common
and a deadline; a batch of long prompts that comes in bursts and can wait; urgent short questions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from bench.sim_engine import Simulation, WorkerModel
from bench.sim_fairness import percentile
from bench.sim_workload import Stream, Zipf, jobs_of
from scheduler_svc.core.config import PolicyName, SchedulerConfig

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

STREAMS = [
    Stream(
        "chat",
        rate=12.0,
        prompt=Zipf(16, 512),
        answer=Zipf(32, 384),
        deadline_ms=30_000,
        num_prefixes=4,
    ),
    Stream(
        "batch",
        rate=6.0,
        prompt=Zipf(512, 4096),
        answer=Zipf(64, 512),
        arrivals="bursts",
        priority=10,
    ),
    Stream(
        "urgent", rate=1.0, prompt=Zipf(16, 128), answer=Zipf(8, 64), priority=-10, deadline_ms=2000
    ),
]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one policy came to. Times in seconds."""

    policy: str
    simulation: Simulation
    utilisation: float  # share of the time that a worker computes

    def ttfts(self, tenant: str) -> list[float]:
        """Times to first token of a tenant, in order."""
        outcomes = self.simulation.outcomes.values()
        return sorted(one.ttft for one in outcomes if one.job.stream.tenant == tenant)

    def line(self) -> str:
        """The figures of a policy as a row of the table."""
        waits = "".join(
            f"{percentile(times, 0.5):9.2f}{percentile(times, 0.99):9.2f}"
            for times in (self.ttfts(stream.tenant) for stream in STREAMS)
        )
        totals = self.simulation.scheduler.totals
        return f"{self.policy:10}{waits}{self.utilisation:10.0%}{totals.num_preemptions:10}"


_TIMES = f"{'p50':>9}{'p99':>9}"
HEAD = (
    f"{'':10}{'chat':>18}{'batch':>18}{'urgent':>18}\n"
    f"{'policy':10}{3 * _TIMES}{'busy':>10}{'preempted':>10}"
)


def compare_policies(
    seconds: float, workers: int, *, load: float = 1.0, knows_tenants: bool = False
) -> list[Figures]:
    """Run every policy on one workload. All count as one tenant unless `knows_tenants`."""
    streams = [replace(stream, rate=stream.rate * workers * load) for stream in STREAMS]
    jobs = jobs_of(streams, seconds, seed=1)
    found = []
    for policy in POLICIES:
        config = SchedulerConfig(policy=policy, deadline_action="ignore", priority_ageing_s=5.0)
        simulation = Simulation(config, WorkerModel(), workers=workers, knows_tenants=knows_tenants)
        simulation.run(jobs)
        span = max(service.end for service in simulation.services)
        busy = sum(service.seconds for service in simulation.services)
        found.append(Figures(policy, simulation, busy / span / workers))
    return found
