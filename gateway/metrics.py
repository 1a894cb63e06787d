"""What the gateway measures, for Prometheus.

Names, labels and buckets are vLLM's where vLLM has the figure, so that dashboards and routers work
unchanged; the rest is under `pagestream:`. These figures are this gateway's own: add them up over
gateways. Those of the pool are `pool_figures`'.

Each app has registries of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from gateway.latencies import Latencies
from gateway.pool_figures import ENGINE, LABELS, PoolFigures
from wire.config import Settings

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

REASONS = ("stop", "length", "abort", "error")
REFUSALS = ("queue_full", "rate_limit_exceeded", "unavailable")
SOURCES = ("local_compute", "local_cache_hit")


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


class GatewayFigures:
    """What there is to tell before the model is known: of the pool, and of HTTP."""

    def __init__(self, settings: Settings) -> None:
        self.pool = PoolFigures(settings)
        self._labels = (settings.model_name, ENGINE)
        self._registry = CollectorRegistry()
        self._registry.register(self.pool)
        self._responses = Counter(
            "pagestream:http_responses",
            "Responses, by the route that was asked for.",
            (*LABELS, "method", "path", "status"),
            registry=self._registry,
        )

    def count_response(self, method: str, path: str, status: int) -> None:
        """Count one response; `path` is a route's, without what varies."""
        self._responses.labels(*self._labels, method, path, str(status)).inc()

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class Metrics:
    """The figures of one gateway's requests. The model's length decides the buckets of counts."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.latencies = Latencies()
        self._registry = CollectorRegistry()
        self._values = (model_name, ENGINE)
        sizes = token_count_buckets(max_model_len)
        histogram, counter = self._histogram, self._counter

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
            "vllm:request_queue_time_seconds", "Queued to first step.", _REQUEST_BUCKETS
        )
        self.prefill_time = histogram(
            "vllm:request_prefill_time_seconds", "First step to first token.", _REQUEST_BUCKETS
        )
        self.decode_time = histogram(
            "vllm:request_decode_time_seconds", "First token to last.", _REQUEST_BUCKETS
        )
        self.inference_time = histogram(
            "vllm:request_inference_time_seconds", "First step to last token.", _REQUEST_BUCKETS
        )
        self.preempted_time = histogram(
            "pagestream:request_preempted_time_seconds",
            "Waiting after preemptions, all of a request's together.",
            _REQUEST_BUCKETS,
        )
        self.request_prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt.", sizes
        )
        self.prefill_computed_tokens = histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Tokens of a prompt that were not in the prefix cache.",
            sizes,
        )
        self.request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens generated.", sizes
        )
        self.max_num_generation_tokens = histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a prompt's longest choice.", sizes
        )
        self.params_max_tokens = histogram(
            "vllm:request_params_max_tokens", "Tokens allowed.", sizes
        )
        self.params_n = histogram("vllm:request_params_n", "Choices asked for.", _CHOICES_BUCKETS)
        self.num_preemptions = histogram(
            "vllm:request_num_preemptions", "Preemptions of a request.", _PREEMPTION_BUCKETS
        )
        self.generation_tokens = counter("vllm:generation_tokens", "Generated tokens.").labels(
            *self._values
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of started requests.")
        self._prompt_tokens_cached = counter(
            "vllm:prompt_tokens_cached", "Of those, tokens found in the prefix cache."
        )
        self._prompt_tokens_by_source = counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens, by where they came from.", "source"
        )
        self._success = counter(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason"
        )
        self._refusals = counter(
            "vllm:admission_rejections", "Requests that were not queued.", "reason"
        )
        for family in (self._prompt_tokens, self._prompt_tokens_cached):
            family.labels(*self._values)
        for family, choices in (
            (self._success, REASONS),
            (self._refusals, REFUSALS),
            (self._prompt_tokens_by_source, SOURCES),
        ):
            for choice in choices:  # there from the start, so that a first one is an increase
                family.labels(*self._values, choice)

    def count_prompt(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Count a prompt that was computed, or found in the cache."""
        num_computed = num_tokens - num_cached_tokens
        self.prefill_computed_tokens.observe(num_computed)
        self._prompt_tokens.labels(*self._values).inc(num_tokens)
        self._prompt_tokens_cached.labels(*self._values).inc(num_cached_tokens)
        for source, count in zip(SOURCES, (num_computed, num_cached_tokens), strict=True):
            self._prompt_tokens_by_source.labels(*self._values, source).inc(count)

    def count_end(self, finish_reason: str) -> None:
        """Count one sequence that ended."""
        self._success.labels(*self._values, finish_reason).inc()

    def count_refusal(self, reason: str) -> None:
        """Count an HTTP request of which nothing was queued."""
        self._refusals.labels(*self._values, reason).inc()

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)
        return family.labels(*self._values)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, (*LABELS, *labels), registry=self._registry)
