"""The figures are vLLM's by name, label and bucket, and each is counted once."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.errors import internal
from gateway.metrics import Metrics, RequestTimes, token_count_buckets

LABELS = {"model_name": "m", "engine": "0"}
STATS = {
    "num_requests_running": "3",
    "num_requests_waiting": "5",
    "kv_cache_usage_perc": "0.25",
    "free_blocks": "75",
    "total_blocks": "100",
    "num_preemptions_total": "7",
    "prefix_cache_queries_total": "50",
    "prefix_cache_hits_total": "20",
    "tokens_recomputed_total": "11",
    "requests_recovered_total": "1",
    "num_steps_total": "40",
    "scheduled_tokens_total": "400",
    "device_us_total": "2000000",
    "commit_us_total": "500000",
    "num_commits_total": "10",
    "epoch": "17",
}


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample that has our two labels, by name; with further labels, by `name/value`."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert LABELS.items() <= sample.labels.items(), sample
            rest = [value for key, value in sample.labels.items() if key not in LABELS]
            found["/".join([sample.name, *rest])] = sample.value
    return found


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def reading(
    stats: Mapping[str, str], calls: list[int] | None = None
) -> Callable[[], Awaitable[Mapping[str, str]]]:
    async def read() -> Mapping[str, str]:
        if calls is not None:
            calls.append(1)
        return stats

    return read


async def test_the_pools_figures_have_vllms_names() -> None:
    metrics = Metrics("m", 1000)
    await metrics.pool.refresh(reading(STATS))
    found = samples(metrics)
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 5
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert found["vllm:num_preemptions_total"] == 7
    assert found["vllm:prefix_cache_queries_total"] == 50
    assert found["vllm:prefix_cache_hits_total"] == 20
    assert found["pagestream:free_blocks"] == 75
    assert found["pagestream:tokens_recomputed_total"] == 11
    assert found["pagestream:epoch"] == 17
    assert found["pagestream:device_seconds_sum"] == 2
    assert found["pagestream:commit_seconds_sum"] == 0.5
    assert found["pagestream:commit_seconds_count"] == 10


async def test_the_pools_figures_are_read_once_a_second_at_most() -> None:
    metrics, calls, clock = Metrics("m", 1000), [], Clock()
    for at, expected in ((0.0, 1), (0.5, 1), (0.99, 1), (1.0, 2), (1.5, 2)):
        clock.now = 100.0 + at
        await metrics.pool.refresh(reading(STATS, calls), clock)
        assert len(calls) == expected


async def test_a_figure_that_is_missing_or_no_number_is_left_out() -> None:
    metrics = Metrics("m", 1000)
    await metrics.pool.refresh(reading({"free_blocks": "many", "epoch": "1"}))
    found = samples(metrics)
    assert "pagestream:free_blocks" not in found
    assert found["pagestream:epoch"] == 1


def test_a_request_is_measured_from_its_arrival_to_its_end() -> None:
    metrics, clock = Metrics("m", 1000), Clock()
    with RequestTimes(metrics, [(20, 50)], n=1, clock=clock) as times:
        times.started(queue_ms=250)
        clock.now += 0.5
        times.tokens(0, 1)
        clock.now += 0.2
        times.tokens(0, 2)
        times.tokens(0, 0)
        clock.now += 0.3
        times.ended(0, "length", 2)
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.5
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.2)
    assert found["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(0.1)
    assert found["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(1.0)
    assert found["vllm:request_queue_time_seconds_sum"] == 0.25
    assert found["vllm:request_prompt_tokens_sum"] == 20
    assert found["vllm:request_generation_tokens_sum"] == 3
    assert found["vllm:request_params_n_sum"] == 1
    assert found["vllm:request_params_max_tokens_sum"] == 50
    assert found["vllm:request_num_preemptions_sum"] == 2
    assert found["vllm:prompt_tokens_total"] == 20
    assert found["vllm:generation_tokens_total"] == 3
    assert found["vllm:request_success_total/length"] == 1
    assert found["vllm:request_success_total/abort"] == 0


def test_what_is_left_open_counts_as_an_error_or_an_abort() -> None:
    metrics = Metrics("m", 1000)
    with (
        contextlib.suppress(Exception),
        RequestTimes(metrics, [(1, 1)] * 2, n=2) as times,
    ):
        times.ended(0, "stop", 0)
        raise internal()
    with RequestTimes(metrics, [(1, 1)], n=1):
        pass  # the client left
    found = samples(metrics)
    assert found["vllm:request_success_total/stop"] == 1
    assert found["vllm:request_success_total/error"] == 1
    assert found["vllm:request_success_total/abort"] == 1


def test_two_apps_have_two_registries() -> None:
    first, second = Metrics("m", 10), Metrics("m", 10)
    first.count_end("stop")
    assert samples(second)["vllm:request_success_total/stop"] == 0


def test_token_counts_have_buckets_up_to_the_context() -> None:
    assert token_count_buckets(100) == [1, 2, 5, 10, 20, 50, 100]
    assert token_count_buckets(8192)[-1] == 5000
    assert token_count_buckets(0) == []
