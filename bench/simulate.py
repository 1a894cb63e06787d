"""Judge a policy without a GPU: the real scheduler core, and workers that only take time.

    python -m bench.simulate policies [--draw FOLDER]   time to first token by policy, utilisation
    python -m bench.simulate fairness                   a tenant's flood beside a modest tenant

Times are simulated seconds of the worker model in `sim_engine`; drawing needs matplotlib.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.sim_engine import Simulation, WorkerModel
from bench.sim_fairness import (
    Fairness,
    capacity,
    fairness,
    flood_and_modest,
    ttft_of,
    unevenness,
)
from bench.sim_policies import HEAD, Figures, compare_policies
from bench.sim_workload import Stream, Zipf, jobs_of
from scheduler_svc.core.config import SchedulerConfig


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["policies", "fairness"])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long requests come")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--load", type=float, default=1.0, help="factor on all arrival rates")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="where to put pictures")
    options = parser.parse_args()
    if options.what == "fairness":
        print_fairness(options.seconds)
        return
    found = compare_policies(options.seconds, options.workers, load=options.load)
    print(HEAD)
    for figures in found:
        print(figures.line())
    if options.draw:
        draw(found, options.draw)


# ---------------------------------------------------------------- fairness


def print_fairness(seconds: float) -> None:
    """Print B's time to first token beside A's flood, with tenants told apart and without."""
    config = SchedulerConfig()
    cases = {
        "prompts 32-1024, answers 16-256": (Stream("x", 1.0), WorkerModel()),
        "the same in bursts": (Stream("x", 1.0, arrivals="bursts"), WorkerModel()),
        "answers 64-1024, 800 blocks": (
            Stream("x", 1.0, answer=Zipf(64, 1024)),
            WorkerModel(num_blocks=800),
        ),
    }
    print(f"{'':34}{'B alone':>9}{'bound':>9}{'beside A':>9}{'fcfs':>9}{'apart':>9}")
    for name, (stream, model) in cases.items():
        rate = capacity(stream, model, config, 20.0)
        streams = flood_and_modest(stream, rate)
        found = fairness(streams, seconds, model, config)
        blind = Simulation(config, model, knows_tenants=False)
        blind.run(jobs_of(streams, seconds, seed=1), watched="b")
        both = Simulation(config, model)
        flood = [streams[0], Stream("b", FLOOD_RATE * rate, stream.prompt, stream.answer)]
        both.run(jobs_of(flood, seconds, seed=1), until=seconds)
        apart = max(unevenness(both, "a", "b"), default=0.0)
        _print_case(name, found, ttft_of(blind, "b"), apart)


FLOOD_RATE = 2.0
"""Of a second tenant that asks for more than its share as well, in workers."""


def _print_case(name: str, found: Fairness, fcfs: float, apart: float) -> None:
    print(
        f"{name:34}{found.ttft_alone:9.2f}{found.bound:9.2f}{found.ttft:9.2f}{fcfs:9.2f}"
        f"{apart:9.1%}",
        flush=True,
    )


# ---------------------------------------------------------------- pictures


def draw(found: list[Figures], folder: Path) -> None:
    """Draw the latency of each stream by policy, and the use of the workers over time."""
    import matplotlib  # noqa: PLC0415 - only who draws needs it

    matplotlib.use("svg")
    from matplotlib import pyplot  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    tenants = sorted({one.job.stream.tenant for one in found[0].simulation.outcomes.values()})
    figure, axes = pyplot.subplots(1, len(tenants), figsize=(4 * len(tenants), 3.5), sharey=True)
    for axis, tenant in zip(axes, tenants, strict=True):
        for figures in found:
            times = figures.ttfts(tenant)
            shares = [(index + 1) / len(times) for index in range(len(times))]
            axis.step(times, shares, where="post", label=figures.policy)
        axis.set(title=tenant, xlabel="time to first token, s", xscale="log")
    axes[0].set_ylabel("share of the requests")
    axes[-1].legend()
    figure.tight_layout()
    figure.savefig(folder / "latency.svg")

    figure, axes = pyplot.subplots(len(found), 1, figsize=(8, 2 * len(found)), sharex=True)
    for axis, figures in zip(axes, found, strict=True):
        services = figures.simulation.services
        ends = [service.end for service in services]
        axis.plot(ends, [service.usage for service in services], linewidth=0.8)
        axis.set(ylim=(0, 1), ylabel=figures.policy)
    axes[0].set_title("share of the blocks that are held")
    axes[-1].set_xlabel("s")
    figure.tight_layout()
    figure.savefig(folder / "utilisation.svg")


if __name__ == "__main__":
    main()
