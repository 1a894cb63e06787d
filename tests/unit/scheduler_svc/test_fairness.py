"""One tenant's flood does not move another's latency, in simulated time: the same every run."""

from __future__ import annotations

from bench.sim_engine import Simulation, WorkerModel
from bench.sim_fairness import fairness, flood_and_modest, ttft_of, unevenness
from bench.sim_workload import Stream, jobs_of
from scheduler_svc.core.config import SchedulerConfig

SECONDS = 15.0
RATE = 55.0  # such requests a second keep the worker of the model busy
STREAM = Stream("any", RATE)


def test_a_flood_does_not_move_a_modest_tenants_latency() -> None:
    streams, model, config = flood_and_modest(STREAM, RATE), WorkerModel(), SchedulerConfig()
    found = fairness(streams, SECONDS, model, config)
    assert found.ttft <= found.bound
    blind = Simulation(config, model, knows_tenants=False)
    blind.run(jobs_of(streams, SECONDS, seed=1), until=SECONDS + 3 * found.bound)
    assert ttft_of(blind, "b") > 3 * found.bound, "first come, first served would do as well"


def test_two_tenants_that_ask_for_more_than_there_is_are_served_alike() -> None:
    streams = [Stream("a", 5 * RATE), Stream("b", 2 * RATE)]
    simulation = Simulation(SchedulerConfig(), WorkerModel())
    simulation.run(jobs_of(streams, SECONDS, seed=1), until=SECONDS)
    apart = unevenness(simulation, "a", "b")
    assert apart, "there was no time in which both waited"
    assert max(apart) <= 0.1


def test_twice_the_weight_is_twice_the_share() -> None:
    streams = [Stream("a", 3 * RATE, weight=2.0), Stream("b", 3 * RATE)]
    simulation = Simulation(SchedulerConfig(), WorkerModel())
    simulation.run(jobs_of(streams, SECONDS, seed=1), until=SECONDS)
    served = {
        tenant: sum(one.tokens.get(tenant, 0) for one in simulation.services if one.end > 5)
        for tenant in "ab"
    }
    assert 1.9 < served["a"] / served["b"] < 2.1
