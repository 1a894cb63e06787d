"""What the gateway measures, and what it tells of the pool, for Prometheus.

Names, labels and buckets are vLLM's where vLLM has the figure, so that dashboards and routers work
unchanged; the rest is under `pagestream:`. Figures of requests are this gateway's own: add them up
over gateways. Figures of the pool are the same at every gateway: take one of them.

Each app has a registry of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.latencies import Latencies

STATS_AGE_S = 1.0  # the pool's figures are read no more often

_LABELS = ("model_name", "engine")
_ENGINE = "0"

_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_CHOICES_BUCKETS = (1, 2, 5, 10, 20)
_PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)

_POOL_GAUGES = {
    "vllm:num_requests_running": ("num_requests_running", "Requests that run."),
    "vllm:num_requests_waiting": ("num_requests_waiting", "Requests that wait."),
    "vllm:kv_cache_usage_perc": ("kv_cache_usage_perc", "KV blocks in use; 1 is all."),
    "pagestream:free_blocks": ("free_blocks", "KV blocks that are free."),
    "pagestream:total_blocks": ("total_blocks", "KV blocks of all workers."),
    "pagestream:epoch": ("epoch", "Fencing number of the leading scheduler."),
}
_POOL_COUNTERS = {
    "vllm:num_preemptions": ("num_preemptions_total", "Preemptions."),
    "vllm:prefix_cache_queries": ("prefix_cache_queries_total", "Tokens looked up."),
    "vllm:prefix_cache_hits": ("prefix_cache_hits_total", "Tokens found."),
    "pagestream:tokens_recomputed": ("tokens_recomputed_total", "Tokens computed again."),
    "pagestream:requests_recovered": ("requests_recovered_total", "Requests that outlived a loss."),
    "pagestream:steps": ("num_steps_total", "Steps."),
    "pagestream:scheduled_tokens": ("scheduled_tokens_total", "Tokens computed."),
}
_POOL_TIMES = {  # microseconds and, where it is a mean that counts, how often
    "pagestream:device_seconds": ("device_us_total", "num_steps_total", "Device time of steps."),
    "pagestream:commit_seconds": ("commit_us_total", "num_commits_total", "Time of commits."),
}


def token_count_buckets(highest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, … up to `highest`."""
    buckets: list[int] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > highest:
                return buckets
            buckets.append(mantissa * scale)
        scale *= 10


class PoolFigures(Collector):
    """The pool's own figures, as the scheduler last wrote them."""

    def __init__(self, model_name: str) -> None:
        self._labels = [model_name, _ENGINE]
        self._stats: Mapping[str, str] = {}
        self._read_at = -math.inf

    async def refresh(
        self,
        read: Callable[[], Awaitable[Mapping[str, str]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the figures anew, if they are a second old. What `read` raises is the caller's."""
        if clock() - self._read_at >= STATS_AGE_S:
            self._read_at = clock()
            self._stats = await read()

    def collect(self) -> Iterable[Metric]:
        """Turn the figures that are there into metrics; one that is missing is left out."""
        for name, (field, text) in _POOL_GAUGES.items():
            if (value := self._number(field)) is not None:
                gauge = GaugeMetricFamily(name, text, labels=_LABELS)
                gauge.add_metric(self._labels, value)
                yield gauge
        for name, (field, text) in _POOL_COUNTERS.items():
            if (value := self._number(field)) is not None:
                counter = CounterMetricFamily(name, text, labels=_LABELS)
                counter.add_metric(self._labels, value)
                yield counter
        for name, (micros_field, count_field, text) in _POOL_TIMES.items():
            micros, count = self._number(micros_field), self._number(count_field)
            if micros is not None and count is not None:
                summary = SummaryMetricFamily(name, text, labels=_LABELS)
                summary.add_metric(self._labels, count_value=int(count), sum_value=micros / 1e6)
                yield summary

    def _number(self, field: str) -> float | None:
        try:
            return float(self._stats[field])
        except (KeyError, ValueError):
            return None


class Metrics:
    """The figures of one gateway. The model's length decides the buckets of token counts."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.pool = PoolFigures(model_name)
        self.latencies = Latencies()
        self._registry = CollectorRegistry()
        self._registry.register(self.pool)
        values = (model_name, _ENGINE)
        sizes = token_count_buckets(max_model_len)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            family = Histogram(name, text, _LABELS, buckets=buckets, registry=self._registry)
            return family.labels(*values)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, _LABELS, registry=self._registry).labels(*values)

        self.time_to_first_token = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = histogram(
            "vllm:inter_token_latency_seconds", "Token to token.", _TOKEN_BUCKETS
        )
        self.time_per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a token after the first.",
            _TOKEN_BUCKETS,
        )
        self.e2e_latency = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST_BUCKETS
        )
        self.queue_time = histogram(
            "vllm:request_queue_time_seconds", "Arrival to first step.", _REQUEST_BUCKETS
        )
        self.request_prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", sizes
        )
        self.request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens generated.", sizes
        )
        self.params_max_tokens = histogram(
            "vllm:request_params_max_tokens", "Tokens allowed.", sizes
        )
        self.params_n = histogram("vllm:request_params_n", "Choices asked for.", _CHOICES_BUCKETS)
        self.num_preemptions = histogram(
            "vllm:request_num_preemptions", "Preemptions of a request.", _PREEMPTION_BUCKETS
        )
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of started requests.")
        self.generation_tokens = counter("vllm:generation_tokens", "Generated tokens.")
        self._success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._values = values
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*values, reason)

    def count_end(self, finish_reason: str) -> None:
        """Count one sequence that ended."""
        self._success.labels(*self._values, finish_reason).inc()

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class RequestTimes:
    """Measures the sequences of one HTTP request, from its arrival; a context that ends them.

    What has not ended when the context is left counts as `error` if it is left by an exception, and
    as `abort` if the client left.
    """

    def __init__(
        self,
        metrics: Metrics,
        sizes: Iterable[tuple[int, int]],
        *,
        n: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to measure sequences of (prompt tokens, most tokens to generate)."""
        self._metrics = metrics
        self._clock = clock
        arrival = clock()
        self._sequences = [_SequenceTimes(metrics, size, n, arrival) for size in sizes]

    def __enter__(self) -> RequestTimes:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        reason = "error" if kind is not None and issubclass(kind, Exception) else "abort"
        for sequence in self._sequences:
            sequence.end(reason, 0, self._clock())

    def started(self, queue_ms: int) -> None:
        """Note that a sequence was scheduled for the first time."""
        self._metrics.queue_time.observe(queue_ms / 1000)

    def tokens(self, index: int, count: int) -> None:
        """Note tokens; several at once share the time since the last one."""
        if count:
            self._sequences[index].tokens(count, self._clock())

    def ended(self, index: int, finish_reason: str, num_preemptions: int) -> None:
        """Note the end of a sequence."""
        self._sequences[index].end(finish_reason, num_preemptions, self._clock())


class _SequenceTimes:
    def __init__(self, metrics: Metrics, size: tuple[int, int], n: int, arrival: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens, self._max_tokens = size
        self._n = n
        self._arrival = arrival
        self._first_token: float | None = None
        self._last_token = arrival
        self._num_tokens = 0
        self._is_open = True

    def tokens(self, count: int, now: float) -> None:
        metrics, num_later = self._metrics, count
        if self._first_token is None:
            self._first_token = now
            metrics.time_to_first_token.observe(now - self._arrival)
            metrics.latencies.note_first(now, now - self._arrival)
            metrics.prompt_tokens.inc(self._num_prompt_tokens)
            num_later -= 1
        if num_later:
            metrics.latencies.note_later(now, (now - self._last_token) / count)
        for _ in range(num_later):
            metrics.inter_token_latency.observe((now - self._last_token) / count)
        metrics.generation_tokens.inc(count)
        self._last_token = now
        self._num_tokens += count

    def end(self, finish_reason: str, num_preemptions: int, now: float) -> None:
        if not self._is_open:
            return
        self._is_open = False
        metrics = self._metrics
        metrics.count_end(finish_reason)
        metrics.e2e_latency.observe(now - self._arrival)
        metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        metrics.request_generation_tokens.observe(self._num_tokens)
        metrics.params_n.observe(self._n)
        metrics.params_max_tokens.observe(self._max_tokens)
        metrics.num_preemptions.observe(num_preemptions)
        if self._first_token is not None and self._num_tokens > 1:
            spent = self._last_token - self._first_token
            metrics.time_per_output_token.observe(spent / (self._num_tokens - 1))
