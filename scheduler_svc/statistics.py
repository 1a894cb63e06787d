"""The pool's counters and gauges, as they stand in Redis with each commit.

Owns what only the shell can measure: times, and the sizes of steps. Counters count from the start
of an epoch on, like those of a process that was started anew.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import product
from typing import get_args

from scheduler_svc.core.outputs import PreemptionMode, PreemptionReason
from scheduler_svc.core.scheduler import Scheduler

Figure = str | int | float

_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_COMMIT_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_OVERHEAD_S = (0.0, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
_PREEMPTIONS = {
    f"preemptions_total:{mode}:{reason}": (mode, reason)
    for mode, reason in product(get_args(PreemptionMode), get_args(PreemptionReason))
}

HISTOGRAMS_EVERY_S = 0.5
"""How often histograms are written, which cost more to write than all else together."""


class Histogram:
    """How often something was at most so large, as one figure: `<bound>=<count> … sum=<sum>`.

    Counts are those of each bucket alone, the last of them above all bounds.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def __str__(self) -> str:
        names = [*map(str, self._bounds), "+Inf"]
        pairs = [f"{name}={count}" for name, count in zip(names, self._counts, strict=True)]
        return " ".join([*pairs, f"sum={self._sum:.6g}"])


class Statistics:
    """Adds what only the shell knows to the totals of the core."""

    def __init__(self, scheduler: Scheduler, epoch: int) -> None:
        self._scheduler = scheduler
        self._epoch = epoch
        self.num_recovered = 0
        self._device_us = 0
        self._num_commits = 0
        self._commit_us = 0
        self._commit_s = Histogram(_COMMIT_S)
        self._step_tokens = Histogram(_TOKENS)
        self._num_tokens = 0  # of all steps that were counted
        self._overhead_s = Histogram(_OVERHEAD_S)
        self._busy_since: dict[str, float] = {}  # workers that had another step before them
        self._written: dict[str, Figure] = {}
        self._histograms_at = -math.inf  # when they are written next

    def note_commit(self, seconds: float) -> None:
        """Count one commit and the time that it took."""
        self._num_commits += 1
        self._commit_us += round(seconds * 1e6)
        self._commit_s.observe(seconds)

    def note_step(self) -> None:
        """Count the tokens of the step that was just scheduled, unless it only tells something."""
        before, self._num_tokens = self._num_tokens, self._scheduler.totals.num_scheduled_tokens
        if self._num_tokens > before:
            self._step_tokens.observe(self._num_tokens - before)

    def note_result(self, worker: str, device_us: int, now: float, *, has_more: bool) -> None:
        """Count a step's time on the device, and what passed beyond that since the one before.

        The latter only where the worker had the step already when it was done with the one before:
        then nobody but us is to blame for it. `has_more`: it has another after this one.
        """
        self._device_us += device_us
        before = self._busy_since.pop(worker, None)
        if before is not None:
            self._overhead_s.observe(max(0.0, now - before - device_us / 1e6))
        if has_more:
            self._busy_since[worker] = now

    def changes(self, now: float) -> dict[str, Figure]:
        """Figures that are not as they were the last time; they must be written."""
        figures = self.figures()
        if now >= self._histograms_at:
            self._histograms_at = now + HISTOGRAMS_EVERY_S
            figures |= self.histograms()
        changed = {n: value for n, value in figures.items() if self._written.get(n) != value}
        self._written |= changed
        return changed

    def figures(self) -> dict[str, Figure]:
        """Everything under the name that dashboards know."""
        lanes, totals = self._scheduler.lanes.values(), self._scheduler.totals
        total_blocks = sum(lane.kv.pool.num_blocks for lane in lanes)
        free_blocks = sum(lane.kv.pool.num_free for lane in lanes)
        usage = 1 - free_blocks / total_blocks if total_blocks else 0.0
        return {
            "epoch": self._epoch,
            "num_requests_running": sum(len(lane.running) + len(lane.ending) for lane in lanes),
            "num_requests_waiting": len(self._scheduler.waiting),
            "kv_cache_usage_perc": round(usage, 6),
            "free_blocks": free_blocks,
            "total_blocks": total_blocks,
            "block_size": max((lane.capacity.block_size for lane in lanes), default=0),
            "num_preemptions_total": totals.num_preemptions,
            **{name: totals.preemptions.get(kind, 0) for name, kind in _PREEMPTIONS.items()},
            "num_requests_swapped": sum(len(lane.swapped) for lane in lanes),
            "free_cpu_blocks": sum(lane.cpu_pool.num_free for lane in lanes),
            "total_cpu_blocks": sum(lane.cpu_pool.num_blocks for lane in lanes),
            "num_swaps_total": totals.num_swaps,
            "swapped_blocks_total": totals.num_swapped_blocks,
            "prefix_cache_queries_total": totals.prefix_cache_queries,
            "prefix_cache_hits_total": totals.prefix_cache_hits,
            "prompt_tokens_total": totals.num_prompt_tokens,
            "generation_tokens_total": totals.num_generated_tokens,
            "tokens_recomputed_total": totals.num_recomputed_tokens,
            "corrupted_requests_total": totals.num_corrupted,
            "requests_recovered_total": self.num_recovered,
            "num_steps_total": totals.num_steps,
            "scheduled_tokens_total": totals.num_scheduled_tokens,
            "device_us_total": self._device_us,
            "commit_us_total": self._commit_us,
            "num_commits_total": self._num_commits,
        }

    def histograms(self) -> dict[str, Figure]:
        """Everything of which more is told than a number."""
        return {
            "commit_seconds": str(self._commit_s),
            "step_tokens": str(self._step_tokens),
            "step_overhead_seconds": str(self._overhead_s),
        }
