"""What dashboards, alerts and autoscalers ask for, a running gateway exports; and it adds up."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.fakes.deployed import adapter_rules, expressions, metrics_in
from tests.fakes.exported import exported
from tests.fakes.gateway_pool import Listener, Pool, gateways, make_pool
from tests.fakes.running_stack import ROOT
from tests.fakes.scheduler_pool import eventually
from wire.config import Settings

pytestmark = pytest.mark.redis

REFERENCE = ROOT / "docs" / "operations.md"


@pytest.fixture
async def pool(make_settings: Callable[..., Settings], oracle_folder: Path) -> AsyncIterator[Pool]:
    async with make_pool(make_settings(model=str(oracle_folder), served_model_name="m")) as made:
        yield made


async def test_every_metric_that_is_asked_for_is_exported(pool: Pool) -> None:
    status, _ = await pool.post({"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1})
    assert status == 200
    asked = set().union(*(metrics_in(one) for one in expressions()))
    asked |= metrics_in(REFERENCE.read_text(encoding="utf-8")) | metrics_in(str(adapter_rules()))
    assert len(asked) > 30

    async def are_there() -> bool:  # a second later, once the scheduler has written them
        there = {name.partition("/")[0] for name in await exported(pool.http, pool.urls[0])}
        there |= {re.sub(r"_(bucket|sum|count|total|info)$", "", name) for name in there}
        return asked <= there

    await eventually(are_there)


async def test_one_request_is_counted_once_everywhere(pool: Pool) -> None:
    body = {"prompt": list(range(40)), "max_tokens": 6, "seed": 1, "n": 2}
    status, _ = await pool.post(body)
    assert status == 200

    async def is_written() -> bool:
        found = await exported(pool.http, pool.urls[0])
        tokens = found.get("pagestream:scheduled_tokens_total", 0)
        return tokens == found.get("vllm:iteration_tokens_total_sum") > 0

    await eventually(is_written)
    found = await exported(pool.http, pool.urls[0])
    assert found["vllm:request_success_total/length"] == 2
    assert found["vllm:generation_tokens_total"] == 12
    assert found["vllm:prompt_tokens_total"] == 80
    by_source = "vllm:prompt_tokens_by_source_total"
    cached = found[f"{by_source}/local_cache_hit"]
    assert found[f"{by_source}/local_compute"] + cached == 80
    assert cached == found["vllm:prompt_tokens_cached_total"] == 32, "two blocks of 16"
    for name in ("queue", "prefill", "decode", "inference"):
        assert found[f"vllm:request_{name}_time_seconds_count"] == 2
    assert found["pagestream:http_responses_total/POST//v1/completions/200"] == 1
    assert found["vllm:request_max_num_generation_tokens_count"] == 1
    tokens = found["vllm:iteration_tokens_total_sum"]
    assert tokens == found["pagestream:scheduled_tokens_total"] >= 80 - 32 + 2 * 5


async def test_a_refused_request_is_told_by_its_reason(
    make_settings: Callable[..., Settings], oracle_folder: Path
) -> None:
    settings = make_settings(model=str(oracle_folder), served_model_name="m", max_queued_requests=1)
    async with gateways(settings) as pool:  # nobody takes anything off the queue
        first = asyncio.ensure_future(pool.post({"prompt": [1], "max_tokens": 1}))

        async def is_queued() -> bool:
            return (await pool.bus.queue_lengths([]))["requests"] == 1

        await eventually(is_queued)
        status, _ = await pool.post({"prompt": [1], "max_tokens": 1})
        assert status == 429
        found = await exported(pool.http, pool.urls[0])
        assert found["vllm:admission_rejections_total/queue_full"] == 1
        assert found["vllm:request_success_total/error"] == 0
        assert found["vllm:e2e_request_latency_seconds_count"] == 0
        assert found["pagestream:processes/scheduler/leader"] == 0
        first.cancel()
        await asyncio.wait([first])


async def test_a_path_that_nobody_has_is_no_label_of_its_own(pool: Pool) -> None:
    for path in ("/nowhere", "/v1/requests/123", "/v1/requests/456"):
        await pool.get(path)
    found = await exported(pool.http, pool.urls[0])
    assert found["pagestream:http_responses_total/GET/other/404"] == 1
    assert found["pagestream:http_responses_total/GET//v1/requests/{id}/404"] == 2


async def test_a_client_that_left_is_counted_as_such(pool: Pool) -> None:
    listener = Listener(pool.http, {"prompt": [1, 2, 3], "max_tokens": 3000, "seed": 1})
    listening = asyncio.ensure_future(listener.listen(pool.urls[0]))
    await listener.has(3)
    listening.cancel()

    async def is_counted() -> bool:
        found = await exported(pool.http, pool.urls[0])
        return found.get("pagestream:http_responses_total/POST//v1/completions/499") == 1

    await eventually(is_counted)
    assert (await exported(pool.http, pool.urls[0]))["vllm:request_success_total/abort"] == 1
