"""What one tenant's flood does to another's latency, and what each of two is served.

Tenant A asks for ten times its half of a worker, B for four fifths of its own half. B is compared
with B alone on a worker of half the speed and half the blocks, which is what it is entitled to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from bench.sim_engine import Simulation, WorkerModel
from bench.sim_workload import Stream, jobs_of
from scheduler_svc.core.config import SchedulerConfig

WINDOW_S = 10.0
FLOOD, MODEST = 10.0, 0.8  # what A and B ask for, in halves of the worker


@dataclass(frozen=True, slots=True)
class Fairness:
    """What became of B. Times in seconds."""

    ttft: float  # 99th percentile beside A
    ttft_alone: float  # on half a worker
    step: float  # longest step beside A

    @property
    def bound(self) -> float:
        """What the 99th percentile may be beside A."""
        return 1.5 * self.ttft_alone + self.step


def capacity(stream: Stream, model: WorkerModel, config: SchedulerConfig, seconds: float) -> float:
    """Requests of a stream that a worker ends in a second, when there are always more."""
    jobs = jobs_of([replace(stream, rate=200.0)], seconds, seed=1)
    outcomes = Simulation(config, model).run(jobs, until=seconds)
    warm = seconds / 2
    return sum(one.finished is not None and one.token_times[-1] > warm for one in outcomes) / warm


def flood_and_modest(stream: Stream, rate: float) -> list[Stream]:
    """A and B, where a whole worker serves `rate` such requests a second."""
    return [
        replace(stream, tenant="a", rate=FLOOD * rate / 2),
        replace(stream, tenant="b", rate=MODEST * rate / 2),
    ]


def fairness(
    streams: list[Stream], seconds: float, model: WorkerModel, config: SchedulerConfig
) -> Fairness:
    """Put A and B through one worker, and B alone through half of one."""
    jobs = jobs_of(streams, seconds, seed=1)
    shared, alone = Simulation(config, model), Simulation(config, model.share(0.5))
    shared.run(jobs, watched="b")
    alone.run([job for job in jobs if job.stream.tenant == "b"])
    step = max(one.seconds for one in shared.services)
    return Fairness(ttft_of(shared, "b"), ttft_of(alone, "b"), step)


def ttft_of(simulation: Simulation, tenant: str) -> float:
    """99th percentile of a tenant's time to first token."""
    outcomes = simulation.outcomes.values()
    return percentile([one.ttft for one in outcomes if one.job.stream.tenant == tenant], 0.99)


def percentile(values: list[float], share: float) -> float:
    """The least value that is not below this share of all (nearest rank)."""
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]


def unevenness(simulation: Simulation, one: str, other: str) -> list[float]:
    """For each 10 s in which both tenants waited all the time: how far apart they were served.

    The difference of the two, relative to the larger. Such a window begins where any step ends.
    """
    services = simulation.services
    ends = [service.end for service in services]
    served = {
        tenant: list(accumulate(service.tokens.get(tenant, 0) for service in services))
        for tenant in (one, other)
    }
    apart = []
    for begin, end in _spans_in_which_wait(simulation, (one, other)):
        first = bisect_left(ends, begin)
        while first < len(ends) and ends[first] + WINDOW_S <= end:
            last = bisect_left(ends, ends[first] + WINDOW_S)
            got = sorted(total[last] - total[first] for total in served.values())
            apart.append(1 - got[0] / got[1])
            first += 1
    return apart


def _spans_in_which_wait(
    simulation: Simulation, tenants: tuple[str, ...]
) -> Iterator[tuple[float, float]]:
    begin = None
    for now, waiting in [*simulation.waiting, (simulation.now, {})]:
        is_busy = all(waiting.get(tenant, 0) > 0 for tenant in tenants)
        if is_busy and begin is None:
            begin = now
        elif not is_busy and begin is not None:
            yield begin, now
            begin = None
