"""A trace of the whole stack: real processes, a real model, and a leader that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.fakes.otlp_collector import Collector, collecting
from tests.fakes.running_stack import PAGESTREAM, RunningStack

pytestmark = pytest.mark.e2e

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with collecting() as made:
        yield made


@pytest.fixture
async def traced(collector: Collector, tmp_path: Path, models: Path) -> AsyncIterator[RunningStack]:
    wish = [f"PAGESTREAM_OTLP_ENDPOINT={collector.url}", "OTEL_BSP_SCHEDULE_DELAY=50"]
    up = RunningStack(["env", *wish, *PAGESTREAM, "up"], tmp_path / "data", models)
    try:
        await asyncio.to_thread(up.wait_ready)
        yield up
        up.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(up.wait_end) == 0
    finally:
        await asyncio.to_thread(up.close)


def events_of(
    up: RunningStack, max_tokens: int, on_begin: Callable[[], object] = lambda: None
) -> int:
    """Read a stream to its end, and say when it has begun; the number of its events."""
    body = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{up.port}/v1/completions",
        json.dumps({**body, "max_tokens": max_tokens, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json", "traceparent": GIVEN},
    )
    count = 0
    with urllib.request.urlopen(request, timeout=300) as stream:
        for line in stream:
            count += line.startswith(b"data: {")
            if count == 3:
                on_begin()
    return count


async def test_a_request_is_one_tree_through_all_three_processes(
    collector: Collector, traced: RunningStack
) -> None:
    await asyncio.to_thread(events_of, traced, 20)
    await asyncio.to_thread(events_of, traced, 1)  # its step tells the worker of the first's end
    await collector.has(request=2, compute=1, **{"POST /v1/completions": 2})
    compute = collector.named("compute")[0]
    [request] = [span for span in collector.named("request") if span.span_id == compute.parent_id]
    [generate] = [one for one in collector.named("generate") if one.span_id == request.parent_id]
    [server] = [one for one in collector.spans if one.span_id == generate.parent_id]
    assert server.parent_id == GIVEN[36:52]
    assert [one.service for one in (server, generate, request, compute)] == [
        *("pagestream-gateway", "pagestream-gateway"),
        *("pagestream-scheduler", "pagestream-worker"),
    ]
    children = collector.below(request)
    phases = {span.name: span for span in children if span.name != "compute"}
    assert list(phases) == ["queue", "prefill", "decode"]
    assert phases["prefill"].start_ns <= compute.start_ns  # a step is sent before it begins
    done = compute.event("prefill_done")
    assert compute.start_ns < done.at_ns < compute.end_ns
    assert compute.attributes["pagestream.num_steps"] >= 20
    assert server.start_ns <= generate.start_ns <= generate.end_ns <= server.end_ns


async def test_a_leader_that_is_killed_leaves_one_tree(
    collector: Collector, traced: RunningStack
) -> None:
    leader = (await asyncio.to_thread(traced.pids))["scheduler"]
    assert leader is not None
    has_begun = threading.Event()
    reading = asyncio.ensure_future(asyncio.to_thread(events_of, traced, 500, has_begun.set))
    await asyncio.to_thread(has_begun.wait)
    await collector.has(prefill=1)  # sent, before its process dies
    os.kill(leader, signal.SIGKILL)
    assert await reading == 500
    await collector.has(request=1, **{"POST /v1/completions": 1})
    [request] = collector.named("request")
    [generate] = collector.named("generate")
    assert request.parent_id == generate.span_id
    assert request.event("recovered")
    order = [span for span in collector.below(request) if span.name != "compute"]
    assert [span.name for span in order] == ["queue", "prefill", "queue", "prefill", "decode"]
    assert [span.attributes.get("pagestream.recovered", False) for span in order][2] is True
    assert {span.trace_id for span in collector.spans} == {GIVEN[3:35]}
