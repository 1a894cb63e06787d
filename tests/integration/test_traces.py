"""A request is one tree of spans, whatever happens to it; and the collector happens to nobody."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.fakes.gateway_pool import FACTS, Listener, Pool, gateways, make_pool
from tests.fakes.gateway_world import PATIENCE_S, TOKENIZER
from tests.fakes.oracle_worker import OracleWorker
from tests.fakes.otlp_collector import Collector, SpanSeen, collecting
from tests.fakes.running_stack import free_port
from tests.fakes.scheduler_pool import scheduler
from tests.fakes.tokenizers import write_model_folder
from wire.config import Settings

pytestmark = pytest.mark.redis

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PHASES = {"queue", "prefill", "decode", "preempted"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "oracle"
    return write_model_folder(folder, TOKENIZER, config=FACTS)


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    async with collecting() as made:
        yield made


@pytest.fixture
def settings_for(make_settings: Callable[..., Settings], folder: Path) -> Callable[..., Settings]:
    def make(endpoint: str, **more: object) -> Settings:
        given = {"model": str(folder), "served_model_name": "m", "otlp_endpoint": endpoint}
        return make_settings(**given, **more)

    return make


@pytest.fixture
def settings(settings_for: Callable[..., Settings], collector: Collector) -> Settings:
    return settings_for(collector.url)


async def ask(pool: Pool, max_tokens: int = 6, **headers: str) -> None:
    body = {"prompt": list(range(40)), "max_tokens": max_tokens, "seed": 1}
    status, answer = await pool.post(body, **headers)
    assert status == 200, answer


def stretches_of(collector: Collector, request: SpanSeen) -> list[str]:
    """What a request went through, in order; one begins where the one before has ended."""
    found = [span for span in collector.below(request) if span.name in PHASES]
    for one, following in itertools.pairwise(found):
        assert one.start_ns <= one.end_ns == following.start_ns
    return [span.name for span in found]


# ---------------------------------------------------------------- the tree


async def test_a_request_is_one_tree_below_the_span_that_its_client_names(
    collector: Collector, settings: Settings
) -> None:
    async with make_pool(settings) as pool:
        await ask(pool, traceparent=GIVEN)
        await collector.has(request=1, generate=1, decode=1, **{"POST /v1/completions": 1})
    server, generate = collector.one("POST /v1/completions"), collector.one("generate")
    request = collector.one("request")
    assert {span.trace_id for span in collector.spans} == {GIVEN[3:35]}
    assert server.parent_id == GIVEN[36:52]
    assert generate.parent_id == server.span_id
    assert request.parent_id == generate.span_id
    assert stretches_of(collector, request) == ["queue", "prefill", "decode"]
    services = [one.service for one in (server, generate, request)]
    assert services == ["pagestream-gateway", "pagestream-gateway", "pagestream-scheduler"]

    assert server.attributes["http.response.status_code"] == 200
    assert generate.attributes["gen_ai.usage.input_tokens"] == 40
    assert request.attributes["gen_ai.usage.output_tokens"] == 6
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert request.attributes["pagestream.request_id"] in generate.attributes.values()

    assert server.start_ns <= generate.start_ns < generate.end_ns <= server.end_ns
    first_token = generate.event("first_token")
    assert generate.start_ns < first_token.at_ns <= generate.end_ns
    ms = 1_000_000  # the time of an arrival is that of Redis, in whole milliseconds
    assert generate.start_ns // ms <= request.start_ns // ms
    children = collector.below(request)
    assert request.start_ns == children[0].start_ns
    assert request.end_ns == max(child.end_ns for child in children)


async def test_each_choice_has_a_branch_of_its_own(
    collector: Collector, settings: Settings
) -> None:
    async with make_pool(settings) as pool:
        status, _ = await pool.post({"prompt": [1, 2], "max_tokens": 3, "seed": 1, "n": 3})
        assert status == 200
        await collector.has(request=3, generate=3, **{"POST /v1/completions": 1})
    server = collector.one("POST /v1/completions")
    assert server.parent_id == "", "nobody named another"
    branches = collector.below(server)
    assert len({branch.span_id for branch in branches}) == 3
    assert all(len(collector.below(branch)) == 1 for branch in branches)


async def test_whoever_wants_no_trace_gets_none(collector: Collector, settings: Settings) -> None:
    async with make_pool(settings) as pool:
        await ask(pool, traceparent=f"{GIVEN[:-1]}0")
        entry = (await pool.bus.newest(pool.bus.keys.requests(), 1) or [None])[0]
        assert entry is None or b"0af765" not in entry.body
        await ask(pool, traceparent=GIVEN.replace("0af7", "1bf7"))
        await collector.has(request=1, generate=1, **{"POST /v1/completions": 1})
    assert {span.trace_id[:4] for span in collector.spans} == {"1bf7"}


async def test_no_span_has_a_prompt_or_an_answer(collector: Collector, settings: Settings) -> None:
    planted = "planted words of a secret prompt"
    async with make_pool(settings) as pool:
        for stop in (None, "never said"):
            body = {"prompt": planted, "max_tokens": 60, "seed": 1, "stop": stop}
            _, answer = await pool.post(body)
        await pool.post({"prompt": planted, "max_tokens": -1})
        said = answer["choices"][0]["text"].encode()
        await collector.has(request=2, **{"POST /v1/completions": 3})
    everything = b"".join(collector.bodies)
    assert len(said) > 3
    assert planted.encode() not in everything
    assert said not in everything


# ---------------------------------------------------------------- what happens to a request


@pytest.mark.parametrize(("num_cpu_blocks", "mode"), [(0, "recompute"), (100, "swap")])
async def test_a_preemption_is_a_stretch_of_its_own(
    collector: Collector, settings: Settings, num_cpu_blocks: int, mode: str
) -> None:
    blocks = {"num_blocks": 12, "num_cpu_blocks": num_cpu_blocks}
    async with make_pool(settings, **blocks) as pool:
        bodies = [{"prompt": [i] * 30, "max_tokens": 60, "seed": 1} for i in range(8)]
        await asyncio.gather(*(pool.post(body) for body in bodies))
        await collector.has(request=8)
    modes = set()
    for request in collector.named("request"):
        order = stretches_of(collector, request)
        preemptions = [event for event in request.events if event.name == "preempted"]
        assert order[0] == "queue"
        assert order[-1] == "decode"
        assert order.count("preempted") == len(preemptions)
        assert request.attributes["pagestream.num_preemptions"] == len(preemptions)
        for one, following in itertools.pairwise(order):
            assert one != "preempted" or following == "prefill", "it starts anew"
        modes |= {event.attributes["pagestream.preemption_mode"] for event in preemptions}
    assert mode in modes


async def test_the_loss_of_a_worker_shows_where_it_hit(
    collector: Collector, settings_for: Callable[..., Settings]
) -> None:
    settings = settings_for(collector.url, worker_timeout_s=0.6)
    async with scheduler(settings), gateways(settings) as pool:
        listener = Listener(pool.http, {"prompt": [1, 2, 3], "max_tokens": 60, "seed": 1})
        async with OracleWorker(settings, step_s=0.01).running():
            listening = asyncio.ensure_future(listener.listen(pool.urls[0]))
            await listener.has(5)
        async with OracleWorker(settings, "another").running():
            await listening
            await collector.has(request=1)
    request = collector.one("request")
    assert stretches_of(collector, request) == ["queue", "prefill", "decode", "preempted",
                                                "prefill", "decode"]  # fmt: skip
    broken = [span for span in collector.below(request) if span.is_error]
    assert [span.name for span in broken] == ["decode"]
    event = request.event("preempted")
    assert event.attributes["pagestream.preemption_mode"] == "worker_lost"


async def test_a_new_leader_goes_on_with_the_span_of_the_one_before(
    collector: Collector, settings: Settings
) -> None:
    async with OracleWorker(settings, step_s=0.01).running(), gateways(settings) as pool:
        listener = Listener(pool.http, {"prompt": [1, 2, 3], "max_tokens": 60, "seed": 1})
        async with scheduler(settings, orderly=False):
            listening = asyncio.ensure_future(listener.listen(pool.urls[0]))
            await listener.has(5)
        async with scheduler(settings):
            await listening
            await collector.has(request=1, **{"POST /v1/completions": 1})
    request = collector.one("request")
    generate = collector.one("generate")
    assert request.parent_id == generate.span_id
    again = request.event("recovered")
    old, new = collector.below(request)[:2], collector.below(request)[2:]
    assert [span.name for span in old] == ["queue", "prefill"], "its decode died with it"
    assert [span.name for span in new] == ["queue", "prefill", "decode"]
    assert new[0].attributes["pagestream.recovered"] is True
    assert {span.attributes["pagestream.epoch"] for span in new} == {
        again.attributes["pagestream.epoch"]
    }
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    assert request.start_ns < new[0].start_ns <= again.at_ns


async def test_a_client_that_comes_back_is_seen_with_the_same_request(
    collector: Collector, settings: Settings
) -> None:
    async with make_pool(settings) as pool:
        for at in (0, 1):
            body = {"prompt": [1, 2, 3], "max_tokens": 4, "seed": 1}
            status, _ = await pool.post(body, at=at, Idempotency_Key="order-17")
            assert status == 200
        await collector.has(request=1, **{"POST /v1/completions": 2})
    visits = collector.named("POST /v1/completions")
    first, second = (visit.attributes["pagestream.request_ids"] for visit in visits)
    assert first == second == [collector.one("request").attributes["pagestream.request_id"]]
    assert len({visit.trace_id for visit in visits}) == 2, "each has a trace of its own"


async def test_a_client_that_leaves_ends_its_spans(
    collector: Collector, settings: Settings
) -> None:
    async with make_pool(settings, step_s=0.01) as pool:
        listener = Listener(pool.http, {"prompt": [1, 2, 3], "max_tokens": 3000, "seed": 1})
        listening = asyncio.ensure_future(listener.listen(pool.urls[0]))
        await listener.has(5)
        listening.cancel()
        await collector.has(request=1, generate=1, **{"POST /v1/completions": 1})
    assert collector.one("POST /v1/completions").event("client_left")
    for name in ("generate", "request"):
        assert collector.one(name).attributes["gen_ai.response.finish_reasons"] == ["abort"]


# ---------------------------------------------------------------- a collector in trouble


async def test_a_collector_that_is_not_there_disturbs_nobody(
    settings_for: Callable[..., Settings],
) -> None:
    settings = settings_for(f"http://127.0.0.1:{free_port()}")
    async with asyncio.timeout(PATIENCE_S), make_pool(settings) as pool:
        for _ in range(20):
            await ask(pool)


@pytest.mark.parametrize("trouble", ["hangs", "is sick"])
async def test_a_collector_that_does_not_take_spans_disturbs_nobody(
    collector: Collector,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    trouble: str,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    is_over = asyncio.Event()
    if trouble == "hangs":
        collector.answer = is_over.wait
    else:
        collector.status = 503
    try:
        async with asyncio.timeout(PATIENCE_S), make_pool(settings) as pool:
            await ask(pool)
            await collector.until(lambda: collector.num_posts > 0)
            await asyncio.gather(*(ask(pool, 3) for _ in range(60)))  # far more spans than fit
            assert collector.spans == []
    finally:
        is_over.set()
