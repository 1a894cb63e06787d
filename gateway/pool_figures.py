"""What a gateway tells of the pool, for Prometheus: what the scheduler wrote, and the roster.

They are the same at every gateway, so take one of them, and not their sum. Counters begin anew with
each epoch, as those of a process do that was started again. What cannot be read is left out: an old
figure would pass for a new one.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from wire.bus import Bus
from wire.config import Settings

FIGURES_AGE_S = 1.0  # the pool's figures are read no more often

LABELS = ("model_name", "engine")
ENGINE = "0"

ROLES = ("gateway", "scheduler", "worker")

_GAUGES = {
    "vllm:num_requests_running": (("num_requests_running",), "Requests that run."),
    "vllm:num_requests_waiting": (
        ("num_requests_waiting", "num_requests_swapped"),
        "Requests that wait, preempted ones too.",
    ),
    "vllm:kv_cache_usage_perc": (("kv_cache_usage_perc",), "KV blocks in use; 1 is all."),
    "vllm:gpu_cache_usage_perc": (("kv_cache_usage_perc",), "The same, under its old name."),
    "pagestream:num_requests_swapped": (
        ("num_requests_swapped",),
        "Requests that wait with their blocks in a CPU pool.",
    ),
    "pagestream:free_blocks": (("free_blocks",), "KV blocks that are free."),
    "pagestream:total_blocks": (("total_blocks",), "KV blocks of all workers."),
    "pagestream:free_cpu_blocks": (("free_cpu_blocks",), "Blocks of CPU pools that are free."),
    "pagestream:total_cpu_blocks": (("total_cpu_blocks",), "Blocks of all CPU pools."),
    "pagestream:epoch": (("epoch",), "Fencing number of the leading scheduler."),
}
"""Name -> fields that are added up, and what it is."""

_WAITING_BY_REASON = {"capacity": "num_requests_waiting", "deferred": "num_requests_swapped"}

_COUNTERS = {
    "vllm:num_preemptions": ("num_preemptions_total", "Preemptions."),
    "vllm:prefix_cache_queries": ("prefix_cache_queries_total", "Tokens looked up."),
    "vllm:prefix_cache_hits": ("prefix_cache_hits_total", "Tokens found."),
    "vllm:corrupted_requests": (
        "corrupted_requests_total",
        "Requests that a worker could not compute: logits not finite, no memory for one token.",
    ),
    "pagestream:tokens_recomputed": ("tokens_recomputed_total", "Tokens computed again."),
    "pagestream:swapped_blocks": (
        "swapped_blocks_total",
        "Blocks copied between device and CPU pool, either way.",
    ),
    "pagestream:requests_recovered": (
        "requests_recovered_total",
        "Requests that the leader found in flight when it took over.",
    ),
    "pagestream:steps": ("num_steps_total", "Steps."),
    "pagestream:scheduled_tokens": ("scheduled_tokens_total", "Tokens computed."),
}

_PREEMPTIONS = "preemptions_total:"  # then mode and reason

_HISTOGRAMS = {
    "vllm:iteration_tokens_total": ("step_tokens", "Tokens of a step."),
    "pagestream:commit_seconds": ("commit_seconds", "Time until a commit is durable."),
    "pagestream:step_overhead_seconds": (
        "step_overhead_seconds",
        "Time from one result to the next beyond the device's own, while it has steps to do.",
    ),
}


@dataclass(frozen=True, slots=True)
class PoolView:
    """What Redis knows of the pool."""

    stats: Mapping[str, str] = field(default_factory=dict)
    states: Mapping[tuple[str, str], int] = field(default_factory=Counter)
    """How many processes of a role are in a state."""


async def look(bus: Bus) -> PoolView:
    """Read figures and rosters. Raises BusError."""
    states: Counter[tuple[str, str]] = Counter()
    for role in ROLES:
        for said in (await bus.processes(role)).values():
            states[role, said.get("state", "lost")] += 1
    return PoolView(await bus.stats(), states)


class PoolFigures(Collector):
    """The pool's own figures, as the scheduler last wrote them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._labels = [settings.model_name, ENGINE]
        self._view: PoolView | None = None
        self._read_at = -math.inf

    async def refresh(
        self,
        read: Callable[[], Awaitable[PoolView]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the figures anew, if they are a second old. What `read` raises is the caller's."""
        if clock() - self._read_at >= FIGURES_AGE_S:
            self._read_at = clock()  # whoever asks meanwhile gets what is there
            try:
                self._view = await read()
            except Exception:
                self._view = None
                raise

    def collect(self) -> Iterable[Metric]:
        """Turn the figures that are there into metrics; one that is missing is left out."""
        is_there = self._view is not None
        yield self._gauge("pagestream:redis_up", "1 if Redis answered.", int(is_there))
        if self._view is None:
            return
        yield from self._gauges()
        yield from self._counters(self._view.stats)
        yield from self._histograms()
        yield from self._times()
        yield self._processes(self._view.states)

    # ------------------------------------------------------------ inside

    def _gauges(self) -> Iterable[Metric]:
        for name, (fields, text) in _GAUGES.items():
            if (value := self._sum(fields)) is not None:
                yield self._gauge(name, text, value)
        free, total = self._sum(["free_cpu_blocks"]), self._sum(["total_cpu_blocks"])
        if free is not None and total is not None:
            usage = 1 - free / total if total else 0.0
            yield self._gauge(
                "pagestream:cpu_cache_usage_perc", "CPU blocks in use; 1 is all.", usage
            )
        waiting = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait: for room, or, preempted, for their way back.",
            labels=(*LABELS, "reason"),
        )
        for reason, name in _WAITING_BY_REASON.items():
            if (value := self._sum([name])) is not None:
                waiting.add_metric([*self._labels, reason], value)
        yield waiting
        if self._sum(["block_size"]):
            yield self._cache_config()

    def _cache_config(self) -> Metric:
        assert self._view is not None
        stats, settings = self._view.stats, self._settings
        facts = {
            "block_size": stats.get("block_size", "0"),
            "num_gpu_blocks": stats.get("total_blocks", "0"),
            "num_cpu_blocks": stats.get("total_cpu_blocks", "0"),
            "enable_prefix_caching": str(settings.enable_prefix_caching),
            "gpu_memory_utilization": str(settings.gpu_memory_utilization),
            "cache_dtype": "auto",
        }
        info = InfoMetricFamily("vllm:cache_config", "How the KV cache is cut.", labels=LABELS)
        info.add_metric(self._labels, facts)
        return info

    def _counters(self, stats: Mapping[str, str]) -> Iterable[Metric]:
        for name, (field_name, text) in _COUNTERS.items():
            if (value := self._sum([field_name])) is not None:
                counter = CounterMetricFamily(name, text, labels=LABELS)
                counter.add_metric(self._labels, value)
                yield counter
        counter = CounterMetricFamily(
            "pagestream:preemptions",
            "Preemptions, by what became of the blocks and why.",
            labels=(*LABELS, "mode", "reason"),
        )
        for field_name in stats:
            mode, _, reason = field_name.removeprefix(_PREEMPTIONS).partition(":")
            if (value := self._sum([field_name])) is not None and reason:
                counter.add_metric([*self._labels, mode, reason], value)
        yield counter

    def _histograms(self) -> Iterable[Metric]:
        for name, (field_name, text) in _HISTOGRAMS.items():
            if (found := self._histogram(field_name)) is not None:
                buckets, total = found
                histogram = HistogramMetricFamily(name, text, labels=LABELS)
                histogram.add_metric(self._labels, buckets, total)
                yield histogram

    def _times(self) -> Iterable[Metric]:
        micros, steps = self._sum(["device_us_total"]), self._sum(["num_steps_total"])
        if micros is not None and steps is not None:
            summary = SummaryMetricFamily(
                "pagestream:device_seconds", "Device time of steps.", labels=LABELS
            )
            summary.add_metric(self._labels, count_value=int(steps), sum_value=micros / 1e6)
            yield summary

    def _processes(self, states: Mapping[tuple[str, str], int]) -> Metric:
        """Count by role and state; those that every pool needs are there with 0 as well."""
        usual = {("scheduler", "leader"): 0, ("worker", "ready"): 0, ("gateway", "ready"): 0}
        family = GaugeMetricFamily(
            "pagestream:processes", "Processes on the roster.", labels=(*LABELS, "role", "state")
        )
        for (role, state), count in sorted({**usual, **states}.items()):
            family.add_metric([*self._labels, role, state], count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _sum(self, fields: Sequence[str]) -> float | None:
        """Add figures up; None if one of them is missing or no number."""
        assert self._view is not None
        try:
            return sum(float(self._view.stats[name]) for name in fields)
        except (KeyError, ValueError):
            return None

    def _histogram(self, name: str) -> tuple[list[tuple[str, float]], float] | None:
        """Buckets, each with all below it, and the sum of what was counted."""
        assert self._view is not None
        buckets: list[tuple[str, float]] = []
        seen = 0.0
        try:
            *counts, total = [one.split("=") for one in self._view.stats[name].split()]
            for bound, count in counts:
                seen += float(count)
                buckets.append((bound, seen))
            return buckets, float(total[1])
        except (KeyError, ValueError, IndexError):
            return None
