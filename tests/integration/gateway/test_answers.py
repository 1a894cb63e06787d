"""What a client gets for a good request, whole and as a stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from gateway.app_keys import READINESS
from tests.fakes.gateway_world import (
    END,
    TOKENIZER,
    World,
    ids_of,
    make_world,
)
from tests.fakes.scripted_engine import Script, saying
from tests.fakes.tokenizers import byte_fallback_tokenizer, write_model_folder
from wire.config import Settings
from wire.messages import SYSTEM_PRIORITY

pytestmark = pytest.mark.redis


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
    assert (request.priority, request.deadline_ms, request.cache_salt) == (
        -2,
        60_000,
        "default/salt",
    )
    assert len(request.req_id) == 32
    assert int(request.req_id, 16) >= 0


async def test_the_engine_gets_words_as_tokens_and_rules_as_they_were_given(world: World) -> None:
    await world.complete(
        "hello world",
        max_tokens=9,
        presence_penalty=0.5,
        logit_bias={"5": -100},
        allowed_token_ids=[7, 5],
        bad_words=["world", "你好"],
        min_tokens=2,
        truncate_prompt_tokens=1,
        add_special_tokens=False,
    )
    [request] = world.engine.requests
    sampling = request.sampling
    assert list(request.prompt_token_ids) == ids_of("hello world")[-1:]
    assert (sampling.presence_penalty, sampling.min_tokens) == (0.5, 2)
    assert (list(sampling.bias_token_ids), sampling.bias_values) == ([5], [-100.0])
    assert list(sampling.allowed_token_ids) == [5, 7]
    words = {tuple(word) for word in sampling.bad_words}
    texts = ("world", " world", "你好", " 你好")
    assert words == {tuple(ids_of(text)) for text in texts}


async def test_an_echo_of_a_prompt_that_was_cut_is_what_was_left(world: World) -> None:
    _, body = await world.complete("say hello", echo=True, truncate_prompt_tokens=1, max_tokens=1)
    last = TOKENIZER.decode(ids_of("say hello")[-1:])
    first = TOKENIZER.decode(ids_of("hello world")[:1])
    assert body["choices"][0]["text"] == last + first


async def test_headers_win_over_the_body(world: World) -> None:
    body = {"prompt": "hello", "priority": 5, "deadline_ms": 1000}
    await world.post("/v1/completions", body, **{"X-Vllm-Priority": "-3"})
    await world.post("/v1/completions", body, **{"X-Priority": "4", "X-Deadline-Ms": "99"})
    first, second = world.engine.requests
    assert (first.priority, first.deadline_ms) == (-3, 1000)
    assert (second.priority, second.deadline_ms) == (4, 99)


async def test_no_client_is_of_the_system_class(world: World) -> None:
    await world.complete("hello", priority=-(2**63))
    await world.post("/v1/completions", {"prompt": "x"}, **{"X-Priority": str(SYSTEM_PRIORITY)})
    assert all(request.priority > SYSTEM_PRIORITY for request in world.engine.requests)


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


async def test_a_completion_goes_on_from_its_prompt_and_a_chat_stands_alone(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    """Where spaces belong to words, the first one is real only behind a prompt."""
    tokenizer = byte_fallback_tokenizer()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = write_model_folder(tmp_path / "m", tokenizer, special_tokens=names)
    async with make_world(make_settings(model=str(folder))) as world:
        world.engine.script = saying([tokenizer.token_to_id("▁world")])
        _, body = await world.complete("hello", echo=True)
        assert body["choices"][0]["text"] == "hello world"
        _, body = await world.chat("hello")
        assert body["choices"][0]["message"]["content"] == "world"


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
