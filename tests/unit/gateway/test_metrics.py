"""The figures are vLLM's by name, label and bucket, and each is counted once."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.errors import internal, invalid, too_busy
from gateway.metrics import GatewayFigures, Metrics, token_count_buckets
from gateway.pool_figures import PoolView
from gateway.request_times import RequestTimes
from gateway.sequences import SequenceOutput
from scheduler_svc.statistics import Histogram
from wire.bus import ClaimedError
from wire.config import load
from wire.messages import FinishReason, StartedRequest

LABELS = {"model_name": "m", "engine": "0"}
STATS = {
    "num_requests_running": "3",
    "num_requests_waiting": "5",
    "num_requests_swapped": "2",
    "kv_cache_usage_perc": "0.25",
    "free_blocks": "75",
    "total_blocks": "100",
    "block_size": "16",
    "free_cpu_blocks": "30",
    "total_cpu_blocks": "40",
    "num_preemptions_total": "7",
    "preemptions_total:swap:memory": "4",
    "preemptions_total:recompute:worker_lost": "3",
    "prefix_cache_queries_total": "50",
    "prefix_cache_hits_total": "20",
    "tokens_recomputed_total": "11",
    "requests_recovered_total": "1",
    "num_steps_total": "40",
    "scheduled_tokens_total": "400",
    "device_us_total": "2000000",
    "epoch": "17",
}


def samples(rendered: bytes) -> dict[str, float]:
    """Every sample that has our two labels, by name; with further labels, by `name/value/…`."""
    found = {}
    for family in text_string_to_metric_families(rendered.decode()):
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


def reading(view: PoolView, calls: list[int] | None = None) -> Callable[[], Awaitable[PoolView]]:
    async def read() -> PoolView:
        if calls is not None:
            calls.append(1)
        return view

    return read


def figures() -> GatewayFigures:
    return GatewayFigures(load(model="m"))


async def pool_samples(view: PoolView) -> dict[str, float]:
    ours = figures()
    await ours.pool.refresh(reading(view))
    return samples(ours.render())


# ---------------------------------------------------------------- the pool


async def test_the_pools_figures_have_vllms_names() -> None:
    found = await pool_samples(PoolView(STATS))
    assert found["vllm:num_requests_running"] == 3
    assert found["vllm:num_requests_waiting"] == 7, "preempted ones wait too"
    assert found["vllm:num_requests_waiting_by_reason/capacity"] == 5
    assert found["vllm:num_requests_waiting_by_reason/deferred"] == 2
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == 0.25
    assert found["vllm:num_preemptions_total"] == 7
    assert found["vllm:prefix_cache_queries_total"] == 50
    assert found["vllm:prefix_cache_hits_total"] == 20
    assert found["pagestream:free_blocks"] == 75
    assert found["pagestream:cpu_cache_usage_perc"] == 0.25
    assert found["pagestream:preemptions_total/swap/memory"] == 4
    assert found["pagestream:preemptions_total/recompute/worker_lost"] == 3
    assert found["pagestream:tokens_recomputed_total"] == 11
    assert found["pagestream:epoch"] == 17
    assert found["pagestream:device_seconds_sum"] == 2
    assert found["pagestream:device_seconds_count"] == 40


async def test_the_cut_of_the_cache_is_told_as_labels() -> None:
    ours = figures()
    await ours.pool.refresh(reading(PoolView(STATS)))
    [line] = [one for one in ours.render().decode().splitlines() if "cache_config_info{" in one]
    assert 'block_size="16"' in line
    assert 'num_gpu_blocks="100"' in line
    assert line.endswith(" 1.0")


async def test_a_histogram_of_the_scheduler_arrives_as_it_was_counted() -> None:
    counted = Histogram((1, 8, 16))
    for value in (1, 2, 8, 9, 100):
        counted.observe(value)
    found = await pool_samples(PoolView({"step_tokens": str(counted)}))
    name = "vllm:iteration_tokens_total"
    assert [found[f"{name}_bucket/{le}"] for le in ("1", "8", "16", "+Inf")] == [1, 3, 4, 5]
    assert (found[f"{name}_sum"], found[f"{name}_count"]) == (120, 5)


async def test_processes_are_counted_and_those_that_are_missing_are_zero() -> None:
    found = await pool_samples(PoolView({}, {("worker", "loading"): 2, ("gateway", "ready"): 1}))
    assert found["pagestream:processes/worker/loading"] == 2
    assert found["pagestream:processes/gateway/ready"] == 1
    assert found["pagestream:processes/worker/ready"] == 0
    assert found["pagestream:processes/scheduler/leader"] == 0
    assert found["pagestream:redis_up"] == 1


async def test_what_cannot_be_read_is_left_out_and_not_told_as_it_was() -> None:
    ours, clock = figures(), Clock()
    await ours.pool.refresh(reading(PoolView(STATS)), clock)
    clock.now += 60

    async def fail() -> PoolView:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await ours.pool.refresh(fail, clock)
    assert samples(ours.render()) == {"pagestream:redis_up": 0}


async def test_the_pools_figures_are_read_once_a_second_at_most() -> None:
    ours, calls, clock = figures(), [], Clock()
    for at, expected in ((0.0, 1), (0.5, 1), (0.99, 1), (1.0, 2), (1.5, 2)):
        clock.now = 100.0 + at
        await ours.pool.refresh(reading(PoolView(STATS), calls), clock)
        assert len(calls) == expected


async def test_a_figure_that_is_missing_or_no_number_is_left_out() -> None:
    stats = {"free_blocks": "many", "epoch": "1", "commit_seconds": "0.1=x sum=1"}
    found = await pool_samples(PoolView(stats))
    assert "pagestream:free_blocks" not in found
    assert not any(name.startswith("pagestream:commit") for name in found)
    assert found["pagestream:epoch"] == 1


# ---------------------------------------------------------------- requests


def output(
    index: int,
    count: int,
    end: FinishReason | None = None,
    *,
    started: StartedRequest | None = None,
    **more: float,
) -> SequenceOutput:
    numbers = {name: int(value) for name, value in more.items() if name != "queued_at"}
    tokens = [7] * count
    return SequenceOutput(
        index,
        "",
        tokens,
        count,
        started,
        end,
        queued_at=more.get("queued_at", 0.0),
        num_preemptions=numbers.get("num_preemptions", 0),
        preempted_ms=numbers.get("preempted_ms", 0),
    )


def test_a_request_is_measured_from_its_arrival_to_its_end() -> None:
    metrics, clock = Metrics("m", 1000), Clock()
    arrival = clock.now
    clock.now += 0.1  # its prompt is encoded
    with RequestTimes(metrics, [(20, 50)], n=1, arrival=arrival, clock=clock) as times:
        queued_at = clock.now
        clock.now += 0.4
        times.note(output(0, 1, started=StartedRequest(1, 16, 250), queued_at=queued_at))
        clock.now += 0.2
        times.note(output(0, 2))
        times.note(output(0, 0))
        clock.now += 0.3
        times.note(output(0, 0, "length", num_preemptions=2, preempted_ms=1500))
    found = samples(metrics.render())
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.5
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.2)
    assert found["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(0.1)
    assert found["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(1.0)
    assert found["vllm:request_queue_time_seconds_sum"] == 0.25
    assert found["vllm:request_prefill_time_seconds_sum"] == pytest.approx(0.15)
    assert found["vllm:request_decode_time_seconds_sum"] == pytest.approx(0.2)
    assert found["vllm:request_inference_time_seconds_sum"] == pytest.approx(0.35)
    assert found["vllm:request_prompt_tokens_sum"] == 20
    assert found["vllm:request_prefill_kv_computed_tokens_sum"] == 4
    assert found["vllm:request_generation_tokens_sum"] == 3
    assert found["vllm:request_params_n_sum"] == 1
    assert found["vllm:request_params_max_tokens_sum"] == 50
    assert found["vllm:request_num_preemptions_sum"] == 2
    assert found["pagestream:request_preempted_time_seconds_sum"] == 1.5
    assert found["vllm:prompt_tokens_total"] == 20
    assert found["vllm:prompt_tokens_cached_total"] == 16
    assert found["vllm:prompt_tokens_by_source_total/local_compute"] == 4
    assert found["vllm:prompt_tokens_by_source_total/local_cache_hit"] == 16
    assert found["vllm:generation_tokens_total"] == 3
    assert found["vllm:request_success_total/length"] == 1
    assert found["vllm:request_success_total/abort"] == 0


def test_the_longest_choice_of_each_prompt_is_counted_once() -> None:
    metrics = Metrics("m", 1000)
    with RequestTimes(metrics, [(1, 9)] * 4, n=2, arrival=0.0) as times:
        for index, count in enumerate((3, 5, 2, 1)):
            times.note(output(index, count, "stop"))
    found = samples(metrics.render())
    assert found["vllm:request_max_num_generation_tokens_count"] == 2
    assert found["vllm:request_max_num_generation_tokens_sum"] == 5 + 2


def test_what_is_left_open_counts_as_an_error_or_an_abort() -> None:
    metrics = Metrics("m", 1000)
    with (
        contextlib.suppress(Exception),
        RequestTimes(metrics, [(1, 1)] * 2, n=2, arrival=0.0) as times,
    ):
        times.ended(0, "stop")
        raise internal()
    with RequestTimes(metrics, [(1, 1)], n=1, arrival=0.0):
        pass  # the client left
    found = samples(metrics.render())
    assert found["vllm:request_success_total/stop"] == 1
    assert found["vllm:request_success_total/error"] == 1
    assert found["vllm:request_success_total/abort"] == 1


def test_what_was_not_queued_is_a_refusal_and_makes_no_latency_look_better() -> None:
    metrics = Metrics("m", 1000)
    for error, is_refusal in ((too_busy("full"), True), (invalid("bad"), False)):
        error.is_refusal = is_refusal
        with (
            contextlib.suppress(Exception),
            RequestTimes(metrics, [(1, 1)], n=1, arrival=0.0),
        ):
            raise error
    with contextlib.suppress(ClaimedError), RequestTimes(metrics, [(1, 1)], n=1, arrival=0.0):
        raise ClaimedError("somebody else's")
    found = samples(metrics.render())
    assert found["vllm:admission_rejections_total/queue_full"] == 1
    assert found["vllm:request_success_total/error"] == 1
    assert found["vllm:e2e_request_latency_seconds_count"] == 1


def test_two_apps_have_two_registries() -> None:
    first, second = Metrics("m", 10), Metrics("m", 10)
    first.count_end("stop")
    assert samples(second.render())["vllm:request_success_total/stop"] == 0


def test_token_counts_have_buckets_up_to_the_context() -> None:
    assert token_count_buckets(100) == [1, 2, 5, 10, 20, 50, 100]
    assert token_count_buckets(8192)[-1] == 5000
    assert token_count_buckets(0) == []
