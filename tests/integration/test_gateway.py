"""The gateway over real HTTP and a real Redis, with an engine that follows a script."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from gateway import engine_client
from gateway.app import create_app
from gateway.app_keys import READINESS
from tests.fakes.redis_server import RedisServer
from tests.fakes.scripted_engine import Script, ScriptedEngine, saying
from tests.fakes.tokenizers import byte_level_tokenizer, write_model_folder
from wire.bus import Bus
from wire.config import Settings, load
from wire.messages import EngineCoreOutputs, token_ids

pytestmark = pytest.mark.redis

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")
PATIENCE_S = 20.0


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


@dataclass
class World:
    """A gateway that serves, and the engine behind it."""

    url: str
    app: web.Application
    engine: ScriptedEngine
    http: aiohttp.ClientSession
    bus: Bus
    settings: Settings

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Any = "hello", **options: Any) -> tuple[int, dict[str, Any]]:
        return await self.post("/v1/completions", {"prompt": prompt, **options})

    async def chat(self, text: str = "hello", **options: Any) -> tuple[int, dict[str, Any]]:
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"messages": messages, **options})

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream; the end mark is the string."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            return parse_events(await response.text())

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)


def parse_events(text: str) -> list[Any]:
    events = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    assert text.endswith("\n\n")
    return events


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def make_world(settings: Settings, **options: Any) -> AsyncIterator[World]:
    bus = Bus.connect(settings)
    app = create_app(settings, bus, **options)
    async with (
        ScriptedEngine(bus, saying(ids_of("hello world"))) as engine,
        serving(app) as url,
        aiohttp.ClientSession() as http,
    ):
        await until(lambda: app[READINESS].model is not None)
        model = app[READINESS].model
        assert model is not None
        await engine.be_ready(model.model_hash)
        await until(lambda: app[READINESS].problem is None)
        yield World(url, app, engine, http, bus, settings)
    await bus.close()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model") / "tiny", TOKENIZER)


@pytest.fixture
async def world(make_settings: Callable[..., Settings], model_folder: Path) -> AsyncIterator[World]:
    settings = make_settings(
        model=str(model_folder), served_model_name="tiny", max_queued_requests=8, seed=7
    )
    async with make_world(settings, keep_alive_s=0.05) as made:
        yield made


# ---------------------------------------------------------------- what a client gets


async def test_a_completion_is_what_the_engine_said(world: World) -> None:
    status, body = await world.complete("hello", max_tokens=50, model="tiny")
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "tiny"
    [choice] = body["choices"]
    assert choice["text"] == "hello world"
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] is None
    num_prompt, num_output = len(ids_of("hello")), len(ids_of("hello world"))
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_the_engine_gets_the_whole_request(world: World) -> None:
    await world.complete(
        "hello",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=11,
        stop_token_ids=[5, 4],
        priority=-2,
        deadline_ms=60_000,
        cache_salt="salt",
    )
    [request] = world.engine.requests
    sampling = request.sampling
    assert list(request.prompt_token_ids) == ids_of("hello")
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (9, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (3, 0.1, 11)
    assert (sampling.eos_token_ids, sampling.stop_token_ids) == ([END], [4, 5])
    assert (request.priority, request.deadline_ms, request.cache_salt) == (-2, 60_000, "salt")
    assert len(request.req_id) == 32
    assert int(request.req_id, 16) >= 0


async def test_headers_win_over_the_body(world: World) -> None:
    body = {"prompt": "hello", "priority": 5, "deadline_ms": 1000}
    await world.post("/v1/completions", body, **{"X-Vllm-Priority": "-3"})
    await world.post("/v1/completions", body, **{"X-Priority": "4", "X-Deadline-Ms": "99"})
    first, second = world.engine.requests
    assert (first.priority, first.deadline_ms) == (-3, 1000)
    assert (second.priority, second.deadline_ms) == (4, 99)


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-Priority", "high"), ("X-Deadline-Ms", "0"), ("X-Request-Id", "a b"), ("X-Priority", "²")],
)
async def test_a_bad_header_is_refused(world: World, name: str, value: str) -> None:
    status, body = await world.post("/v1/completions", {"prompt": "hello"}, **{name: value})
    assert (status, body["error"]["param"]) == (400, name)
    assert not world.engine.requests


async def test_the_request_id_is_echoed_or_made(world: World) -> None:
    async with world.http.get(
        world.url + "/health", headers={"X-Request-Id": "a-1.b_"}
    ) as response:
        assert response.headers["X-Request-Id"] == "a-1.b_"
    async with world.http.get(world.url + "/nowhere") as response:
        assert len(response.headers["X-Request-Id"]) == 32


async def test_the_openai_client_reads_both_endpoints(world: World) -> None:
    async with world.openai() as client:
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=50
        )
        assert chat.id.startswith("chatcmpl-")
        assert chat.choices[0].message.content == "hello world"
        assert chat.choices[0].message.role == "assistant"
        assert chat.choices[0].finish_reason == "length"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == len(ids_of("hello world"))
        completion = await client.completions.create(model="tiny", prompt="hello", max_tokens=50)
        assert completion.choices[0].text == "hello world"
        models = await client.models.list()
        assert [model.id for model in models.data] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "pagestream"
        with pytest.raises(openai.NotFoundError) as error:
            await client.completions.create(model="other", prompt="hello")
        assert error.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="tiny", prompt="hello", temperature=3)
        assert bad.value.param == "temperature"


async def test_the_openai_client_streams_both_endpoints(world: World) -> None:
    async with world.openai() as client:
        chat = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=50,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in chat]
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
        assert "".join(texts) == "hello world"
        assert [c.choices[0].finish_reason for c in chunks[:-1]][-2:] == [None, "length"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens > 0
        completion = await client.completions.create(
            model="tiny", prompt="hello", max_tokens=50, stream=True
        )
        assert "".join([c.choices[0].text async for c in completion]) == "hello world"


async def test_a_stream_has_the_shape_of_vllms(world: World) -> None:
    events = await world.events(
        "/v1/completions",
        {"prompt": "hello", "max_tokens": 50, "stream_options": {"include_usage": True}},
    )
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ids_of("hello world"))
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in events[:-1]}) == 1
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


async def test_running_usage_grows_with_the_chunks(world: World) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await world.events(
        "/v1/completions", {"prompt": "hello", "max_tokens": 50, "stream_options": options}
    )
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == len(ids_of("hello world"))


async def test_token_ids_are_returned_if_asked_for(world: World) -> None:
    prompt, output = ids_of("hello"), ids_of("hello world")
    _, body = await world.complete(prompt, max_tokens=50, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == output
    assert body["choices"][0]["prompt_token_ids"] == prompt
    events = await world.events(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True},
    )
    assert events[0]["prompt_token_ids"] == list(world.engine.requests[-1].prompt_token_ids)
    streamed = [i for e in events[:-1] for i in e["choices"][0].get("token_ids", [])]
    assert streamed == output


async def test_unfinished_characters_never_reach_a_stream(world: World) -> None:
    text = "smile 👍🏽 你好 नमस्ते \ufffd!"
    vocabulary = world.app[READINESS].model.tokenizer.vocabulary
    single = {p[0]: i for i, p in enumerate(vocabulary.pieces) if len(p) == 1}
    ids = [single[byte] for byte in text.encode()] + [single[0xF0]]
    world.engine.script = saying(ids)
    events = await world.events("/v1/completions", {"prompt": "x", "max_tokens": 200})
    streamed = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert streamed == text + "\ufffd" == TOKENIZER.decode(ids)
    _, body = await world.complete("x", max_tokens=200)
    assert body["choices"][0]["text"] == streamed


async def test_choices_are_siblings_with_seeds_of_their_own(world: World) -> None:
    texts = ["one", "two", "three four"]
    world.engine.script = lambda request: Script(ids_of(texts[request.sampling.seed - 40]))
    _, body = await world.complete("hello", n=3, seed=40, max_tokens=50)
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    requests = world.engine.requests
    assert len({request.req_id for request in requests}) == 3
    assert body["usage"]["prompt_tokens"] == len(ids_of("hello"))
    assert body["usage"]["completion_tokens"] == sum(len(ids_of(text)) for text in texts)
    events = await world.events(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "n": 3,
            "seed": 40,
            "max_tokens": 50,
        },
    )
    streamed = ["", "", ""]
    ended = []
    for event in events[:-1]:
        [choice] = event["choices"]
        streamed[choice["index"]] += choice["delta"]["content"]
        ended += [choice["index"]] * (choice["finish_reason"] is not None)
    assert streamed == texts
    assert sorted(ended) == [0, 1, 2]


async def test_several_prompts_are_numbered_through(world: World) -> None:
    world.engine.script = lambda request: Script(list(request.prompt_token_ids))
    _, body = await world.complete(["one", ids_of("two"), "three"], n=2, max_tokens=50)
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == ["one", "one", "two", "two", "three", "three"]
    assert body["usage"]["prompt_tokens"] == sum(len(ids_of(t)) for t in ("one", "two", "three"))


async def test_one_bad_prompt_leaves_nothing_running(world: World) -> None:
    status, body = await world.complete(["fine", "", "fine"])
    assert (status, body["error"]["param"]) == (400, "prompt.1")
    await world.complete("after")
    assert len(world.engine.requests) == 1


async def test_an_echo_stands_before_the_output(world: World) -> None:
    _, body = await world.complete("say", echo=True, max_tokens=50)
    assert body["choices"][0]["text"] == "sayhello world"
    _, body = await world.complete(ids_of("say it"), echo=True, max_tokens=50)
    assert body["choices"][0]["text"] == "say ithello world"
    events = await world.events("/v1/completions", {"prompt": "say", "echo": True})
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "sayhello world"


async def test_an_echo_alone_needs_no_engine(world: World) -> None:
    _, body = await world.complete("say", echo=True, max_tokens=0)
    assert body["choices"][0]["text"] == "say"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    events = await world.events("/v1/completions", {"prompt": "say", "echo": True, "max_tokens": 0})
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "say"
    assert not world.engine.requests


async def test_output_ends_where_the_context_ends(world: World) -> None:
    prompt = [5] * 250  # of 256
    world.engine.script = saying([7] * 100)
    _, body = await world.complete(prompt, max_tokens=100)
    assert body["usage"]["completion_tokens"] == 6
    for too_long in ([5] * 256, [5] * 300):
        status, body = await world.complete(too_long)
        assert status == 400
        assert str(len(too_long)) in body["error"]["message"]
        assert "256" in body["error"]["message"]


# ---------------------------------------------------------------- ends


async def test_a_stop_token_is_reported_and_is_no_text(world: World) -> None:
    stop = ids_of("x")[0]
    world.engine.script = saying([*ids_of("hello"), stop], finish_reason="stop", stop_token_id=stop)
    _, body = await world.complete("a", stop_token_ids=[stop], max_tokens=50)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "stop")
    assert choice["stop_reason"] == stop
    assert body["usage"]["completion_tokens"] == len(ids_of("hello")) + 1


async def test_the_end_of_sequence_is_a_stop_without_a_reason(world: World) -> None:
    world.engine.script = saying([*ids_of("hello"), END], finish_reason="stop")
    _, body = await world.chat(skip_special_tokens=False)
    [choice] = body["choices"]
    assert choice["message"]["content"] == "hello"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


STOPS = [
    ("two", "one ", 1),  # inside the text
    ("o th", "one tw", 1),  # across tokens
    ("one", "", 1),  # at the start
    ("five!", "one two three four ", 1),  # at the very end
]


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("stop", "before", "_"), STOPS)
async def test_a_stop_string_ends_stream_and_body_alike(
    world: World, stop: str, before: str, include: bool, endpoint: str, _: int
) -> None:
    text = "one two three four five!"
    ids = ids_of(text)
    world.engine.script = saying(ids)
    body: dict[str, Any] = {"prompt": "x"}
    path = "/v1/completions"
    if endpoint == "chat":
        body, path = {"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"
    body |= {"stop": [stop], "include_stop_str_in_output": include, "max_tokens": len(ids)}
    expected = before + stop * include
    _, whole = await world.post(path, body)
    events = await world.events(path, body)
    [choice] = whole["choices"]
    found = choice["text"] if endpoint == "completions" else choice["message"]["content"]
    assert found == expected
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    choices = [event["choices"][0] for event in events[:-1]]
    texts = [c["text"] if endpoint == "completions" else c["delta"]["content"] for c in choices]
    assert "".join(texts) == expected
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    complete = next(n for n in range(len(ids) + 1) if stop in TOKENIZER.decode(ids[:n]))
    assert whole["usage"]["completion_tokens"] == complete


async def test_a_stop_string_ends_the_computation_at_its_token(world: World) -> None:
    ids = ids_of("one two three four five")
    world.engine.script = saying(ids + [7] * 500, finish_reason=None)
    _, body = await world.complete("x", stop="two", max_tokens=250)
    await world.engine.wait_for(lambda: bool(world.engine.aborts))
    [abort] = world.engine.aborts
    assert abort.req_id == world.engine.requests[0].req_id
    assert abort.reason == "stop"
    assert abort.num_output_tokens == body["usage"]["completion_tokens"]
    await world.engine.wait_for(lambda: world.engine.num_running == 0)


async def test_what_could_have_been_a_stop_string_is_sent_at_the_end(world: World) -> None:
    world.engine.script = saying(ids_of("one two"))
    events = await world.events(
        "/v1/completions", {"prompt": "x", "stop": "two!", "max_tokens": 50}
    )
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "one two"
    assert not world.engine.aborts


# ---------------------------------------------------------------- clients that leave or are slow


async def begin(world: World, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Send a request on a connection of its own, and read no answer."""
    host, port = world.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + raw)
    await writer.drain()
    return writer


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["queued", "running"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_ends_its_requests(
    world: World, n: int, when: str, stream: bool, how: str
) -> None:
    engine = world.engine
    engine.script = saying(ids_of("hello world"), finish_reason=None)
    if when == "queued":
        engine.be_silent()
    writer = await begin(world, {"prompt": "x", "stream": stream, "n": n, "max_tokens": 100})
    await engine.wait_for(lambda: engine.num_running == n)
    if how == "reset":
        writer.transport.abort()
    writer.close()
    await engine.wait_for(lambda: len(engine.aborts) == n)
    assert {a.req_id for a in engine.aborts} == {r.req_id for r in engine.requests}
    assert {a.reason for a in engine.aborts} == {"abort"}
    await engine.wait_for(lambda: engine.num_running == 0)


async def test_a_request_that_ended_is_not_aborted(world: World) -> None:
    engine = world.engine
    await world.complete("hello", max_tokens=50)
    await world.events("/v1/completions", {"prompt": "hello"})
    engine.script = saying([], finish_reason=None)
    writer = await begin(world, {"prompt": "x"})
    await engine.wait_for(lambda: len(engine.requests) == 3)
    writer.close()
    await engine.wait_for(lambda: bool(engine.aborts))
    assert [abort.req_id for abort in engine.aborts] == [engine.requests[2].req_id]


async def test_a_slow_reader_gets_everything_in_fewer_pieces(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    """A client reads nothing until the engine has said it all; others are not held up."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["y" * 100_000])  # fills the sockets between the two
    long = tokenizer.get_vocab_size() - 1
    settings = make_settings(model=str(write_model_folder(tmp_path / "long", tokenizer)))
    async with make_world(settings) as world:
        engine = world.engine
        engine.script = saying([long, 5] * 100)
        body = {"prompt": "x", "max_tokens": 200, "stream": True}
        async with world.http.post(world.url + "/v1/completions", json=body) as response:
            await engine.wait_for(lambda: len(engine.requests) == 1 and engine.num_running == 0)
            engine.script = saying(ids_of("hello"))
            assert (await world.complete("x"))[1]["choices"][0]["text"] == "hello"
            events = parse_events(await response.text())
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == ("y" * 100_000 + tokenizer.decode([5])) * 100
    assert len(texts) < 150


async def test_a_stream_with_nothing_to_say_shows_that_it_lives(world: World) -> None:
    world.engine.be_silent()
    url = world.url + "/v1/completions"
    async with world.http.post(url, json={"prompt": "x", "stream": True}) as response:
        assert await response.content.readline() == b": keep-alive\n"
        world.engine.talk()
        assert parse_events((await response.text()).lstrip("\n"))[-1] == "[DONE]"


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("code", "status"), [("invalid", 400), ("unavailable", 503), ("internal", 500)]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_byte_is_a_status(
    world: World, stream: bool, code: str, status: int
) -> None:
    world.engine.script = saying([], finish_reason="error", error="no room", error_code=code)
    found, body = await world.complete("x", stream=stream)
    assert (found, body["error"]["message"]) == (status, "no room")
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert not world.engine.aborts


async def test_an_error_after_the_first_byte_is_an_event(world: World) -> None:
    world.engine.script = saying(
        ids_of("hello world"), finish_reason="error", error="broken", error_code="internal"
    )
    *chunks, error, done = await world.events("/v1/completions", {"prompt": "x", "max_tokens": 50})
    assert done == "[DONE]"
    assert error["error"]["message"] == "broken"
    assert chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)


async def test_an_error_of_one_choice_ends_the_others(world: World) -> None:
    fails = Script([], "error", error="broken", error_code="internal")
    works = Script(ids_of("hello"), None)
    world.engine.script = lambda request: works if request.sampling.seed % 2 else fails
    status, body = await world.complete("x", n=2, seed=10)
    assert (status, body["error"]["message"]) == (500, "broken")
    await world.engine.wait_for(lambda: bool(world.engine.aborts))
    odd = [r.req_id for r in world.engine.requests if r.sampling.seed % 2]
    assert [abort.req_id for abort in world.engine.aborts] == odd


async def test_a_missing_token_ends_a_request_with_an_error(world: World) -> None:
    world.engine.script = saying(ids_of("hello"), finish_reason=None)
    answer = asyncio.ensure_future(world.complete("x", max_tokens=50))
    await world.engine.wait_for(lambda: world.engine.num_running == 1)
    [request] = world.engine.requests
    gap = EngineCoreOutputs(token_ids([request.handle]), token_ids([20]), token_ids([5]))
    await world.engine.send(request.gateway, gap)
    status, body = await answer
    assert status == 500
    assert "lost" in body["error"]["message"]
    await world.engine.wait_for(lambda: bool(world.engine.aborts))


async def test_a_full_queue_is_a_429_and_queues_nothing(world: World) -> None:
    engine = world.engine
    engine.be_silent()
    waiting = [asyncio.ensure_future(world.complete("x")) for _ in range(8)]
    await engine.wait_for(lambda: engine.num_running == 8)
    url = world.url + "/v1/completions"
    async with world.http.post(url, json={"prompt": "x"}) as response:
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        assert (await response.json())["error"]["type"] == "rate_limit_error"
    status, body = await world.complete("x", n=9)
    assert status == 400
    assert "MAX_QUEUED_REQUESTS" in body["error"]["message"]
    engine.talk()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 8
    assert len(engine.requests) == 8
    assert (await world.complete("x"))[0] == 200


async def test_siblings_are_queued_together_or_not_at_all(world: World) -> None:
    engine = world.engine
    engine.be_silent()
    waiting = [asyncio.ensure_future(world.complete("x")) for _ in range(6)]
    await engine.wait_for(lambda: engine.num_running == 6)
    assert (await world.complete("x", n=3))[0] == 429
    engine.talk()
    await asyncio.gather(*waiting)
    assert len(engine.requests) == 6


BAD_BODIES = [
    (b"", 400),
    (b"{", 400),
    (b"[]", 400),
    (b'{"prompt": NaN}', 400),
    (b'{"prompt": "x", "temperature": 1e400}', 400),
    (b'{"prompt": "\xff"}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400),
    (b'{"prompt": "' + b"x" * 2_000_000 + b'"}', 413),
]


@pytest.mark.parametrize(("raw", "status"), BAD_BODIES, ids=range(len(BAD_BODIES)))
async def test_a_body_that_is_no_request_is_refused(
    make_settings: Callable[..., Settings], model_folder: Path, raw: bytes, status: int
) -> None:
    settings = make_settings(model=str(model_folder), max_body_bytes=1_000_000)
    headers = {"Content-Type": "application/json"}
    async with make_world(settings) as world:
        url = world.url + "/v1/completions"
        async with world.http.post(url, data=io.BytesIO(raw), headers=headers) as response:
            assert response.status == status
            text = await response.text()
        error = json.loads(text, parse_constant=pytest.fail)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert not world.engine.requests
        assert (await world.complete("x"))[0] == 200


async def test_other_content_is_refused(world: World) -> None:
    url = world.url + "/v1/completions"
    async with world.http.post(url, data={"prompt": "x"}) as response:
        assert response.status == 400
        assert "application/json" in (await response.json())["error"]["message"]
    gzip = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with world.http.post(url, data=b"this is not gzip", headers=gzip) as response:
        assert response.status == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/nothing", 404),
        ("GET", "/v1/models/other", 404),
        ("DELETE", "/health", 405),
    ],
)
async def test_a_wrong_path_or_method_has_an_openai_body(
    world: World, method: str, path: str, status: int
) -> None:
    async with world.http.request(method, world.url + path) as response:
        assert response.status == status
        assert (status == 405) == ("Allow" in response.headers)
        assert (await response.json())["error"]["message"]


# ---------------------------------------------------------------- chat


async def test_a_chat_is_encoded_by_the_models_template(world: World) -> None:
    await world.chat("hello")
    prompt = list(world.engine.requests[0].prompt_token_ids)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == ids_of(text)


async def test_a_refusal_of_the_template_is_a_400_with_its_words(world: World) -> None:
    status, body = await world.chat("refuse me")
    assert status == 400
    assert "roles must alternate" in body["error"]["message"]


# ---------------------------------------------------------------- Redis


@pytest.fixture
async def durable(redis_kind: str, model_folder: Path) -> AsyncIterator[tuple[RedisServer, World]]:
    """A world on a Redis that keeps its data when it is restarted."""
    server = RedisServer(redis_kind, aof=True)
    try:
        settings = load(redis_url=server.url, model=str(model_folder))
        async with make_world(settings) as world:
            yield server, world
    finally:
        server.close()


async def test_a_request_waits_for_a_redis_that_comes_back(
    durable: tuple[RedisServer, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, world = durable
    attempts = asyncio.Semaphore(0)
    submit = world.bus.submit

    async def attempt(*args: Any, **options: Any) -> list[int]:
        attempts.release()
        return await submit(*args, **options)

    monkeypatch.setattr(world.bus, "submit", attempt)
    await asyncio.to_thread(server.stop)
    answer = asyncio.ensure_future(world.complete("x", max_tokens=50))
    await attempts.acquire()
    await attempts.acquire()
    await asyncio.to_thread(server.start)
    status, body = await answer
    assert (status, body["choices"][0]["text"]) == (200, "hello world")
    assert len(world.engine.requests) == 1


async def test_a_stream_goes_on_after_redis_was_away(durable: tuple[RedisServer, World]) -> None:
    server, world = durable
    ids = ids_of("hello world, how are you today?")
    world.engine.script = saying(ids)
    world.engine.be_silent()
    url = world.url + "/v1/completions"
    async with world.http.post(url, json={"prompt": "x", "max_tokens": 99, "stream": True}) as got:
        pass_one = asyncio.ensure_future(got.text())
        await world.engine.wait_for(lambda: world.engine.num_running == 1)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        world.engine.talk()
        events = parse_events(await pass_one)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == TOKENIZER.decode(ids)


async def test_a_redis_that_stays_away_is_a_503(
    durable: tuple[RedisServer, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, world = durable
    monkeypatch.setattr(engine_client, "SUBMIT_PATIENCE_S", 0.2)
    await asyncio.to_thread(server.stop)
    async with world.http.post(world.url + "/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 503
        assert response.headers["Retry-After"]
        assert (await response.json())["error"]["type"] == "service_unavailable_error"
    await asyncio.to_thread(server.start)
    assert (await world.complete("x"))[0] == 200
