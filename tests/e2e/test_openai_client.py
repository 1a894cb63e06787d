"""What the official `openai` client asks of a server, and whether this one keeps its side."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.fakes.gateway_process import starting
from tests.fakes.running_stack import RunningStack, free_port
from wire.api_keys import add_key

pytestmark = pytest.mark.e2e

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
CHAT: dict[str, Any] = {**GREEDY, "messages": QUESTION, "max_completion_tokens": 24}
WEATHER = {
    "type": "object",
    "properties": {"place": {"enum": ["Bonn", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]


@pytest.fixture
async def client(stack: RunningStack) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{stack.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**CHAT)
    [choice] = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    usage = answer.usage
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens <= 24
    assert [model.id async for model in client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).id == "demo"


async def test_chat_as_a_stream(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**CHAT)
    stream = await client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    async with client.chat.completions.stream(**CHAT) as events:
        final = await events.get_final_completion()
    assert final.choices[0].message.content == said


async def test_completions_whole_and_as_a_stream(client: openai.AsyncOpenAI) -> None:
    asked = {**GREEDY, "prompt": ["The capital of France is", [504, 3575]], "max_tokens": 5}
    whole = await client.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert "Paris" in whole.choices[0].text
    texts = ["", ""]
    async for chunk in await client.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    stopped = await client.completions.create(
        **{**asked, "prompt": "1 2 3 4"}, stop=["6"], echo=True
    )
    assert stopped.choices[0].text.startswith("1 2 3 4")
    assert "6" not in stopped.choices[0].text


async def test_log_probabilities(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    text = b"".join(bytes(one.bytes or ()) for one in logprobs.content)
    assert text.decode() == answer.choices[0].message.content
    for one in logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == max(other.logprob for other in one.top_logprobs) <= 0
    completion = await client.completions.create(**GREEDY, prompt="One", logprobs=2, max_tokens=4)
    lists = completion.choices[0].logprobs
    assert lists is not None and lists.token_logprobs is not None and lists.tokens is not None
    assert len(lists.token_logprobs) == len(lists.tokens) == len(lists.top_logprobs or ()) == 4
    assert all(-math.inf < value <= 0 for value in lists.token_logprobs)


async def test_several_choices(client: openai.AsyncOpenAI) -> None:
    asked = {**CHAT, "temperature": 1, "seed": 5}
    several = await client.chat.completions.create(**asked, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) > 1
    texts, ends = ["", "", ""], []
    async for chunk in await client.chat.completions.create(**asked, n=3, stream=True):
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert all(texts)
    assert sorted(ends) == [0, 1, 2]
    with pytest.raises(openai.BadRequestError, match="n"):
        await client.chat.completions.create(**CHAT, n=2)  # greedy ones would all be alike


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_tools(client: openai.AsyncOpenAI, choice: Any) -> None:
    asked = {**CHAT, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    asked["max_completion_tokens"] = 300
    answer = await client.chat.completions.create(**asked)
    [call] = answer.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "weather"
    assert answer.choices[0].finish_reason == "tool_calls"
    async with client.chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    [streamed] = final.choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    messages = [
        *QUESTION,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    spoken = await client.chat.completions.create(**{**CHAT, "messages": messages})
    assert spoken.choices[0].message.content


class Order(BaseModel):
    """A type whose schema the client makes and whose instance it reads."""

    dish: Literal["soup", "rice"]
    number: Literal[1, 2]


async def test_a_type_through_parse(client: openai.AsyncOpenAI) -> None:
    asked = {**CHAT, "max_completion_tokens": 200, "response_format": Order}
    parsed = (await client.chat.completions.parse(**asked)).choices[0].message.parsed
    assert isinstance(parsed, Order)
    async with client.chat.completions.stream(**asked) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed


async def test_strict_tools_through_parse(client: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Order)
    asked = {**CHAT, "max_completion_tokens": 300, "tools": [tool], "tool_choice": "required"}
    parsed = await client.chat.completions.parse(**asked, parallel_tool_calls=False)
    [call] = parsed.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Order)


async def test_a_schema_is_met(client: openai.AsyncOpenAI) -> None:
    schema: Any = {"name": "weather", "schema": WEATHER, "strict": True}
    asked = {**CHAT, "max_completion_tokens": 200}
    answer = await client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": schema}
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), WEATHER)


# ---------------------------------------------------------------- errors, timeouts, retries


async def test_what_is_wrong_has_the_clients_own_class(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(**{**CHAT, "temperature": 3})
    assert (bad.value.status_code, bad.value.param) == (400, "temperature")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(**{**CHAT, "messages": []}, stream=True)
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(**{**CHAT, "model": "gpt-9"})
    assert missing.value.code == "model_not_found"
    key = {"Idempotency-Key": "twice"}
    await client.completions.create(**GREEDY, prompt="a", max_tokens=1, extra_headers=key)
    with pytest.raises(openai.UnprocessableEntityError) as other:
        await client.completions.create(**GREEDY, prompt="b", max_tokens=1, extra_headers=key)
    assert other.value.code == "idempotency_mismatch"


async def test_keys_limits_and_retries(stack: RunningStack, tmp_path: Path) -> None:
    """At a second gateway of the same pool, which wants keys."""
    keys = tmp_path / "keys.toml"
    key = add_key(keys, "user", is_admin=False, tenant="few", expires=None)
    keys.write_text(keys.read_text().replace('tenant = "few"', LIMITED))
    options = {"redis_url": f"unix://{stack.data_dir}/redis.sock", "api_keys_file": keys}
    options |= {"data_dir": stack.data_dir, "model_cache_dir": stack.models}
    async with starting(**options) as start:
        gateway = await start(free_port())
        url = f"{gateway.url}/v1"
        await gateway.wait_status("/ready", 200)
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.get("/../admin/config", cast_to=object)
            asked = {**GREEDY, "prompt": "a", "max_tokens": 1}
            with pytest.raises(openai.RateLimitError) as limited:
                await asyncio.gather(*(client.completions.create(**asked) for _ in range(70)))
            assert limited.value.code == "rate_limit_exceeded"
            assert int(limited.value.response.headers["Retry-After"]) >= 1
            patient = client.with_options(max_retries=5)
            tries = [patient.completions.with_raw_response.create(**asked) for _ in range(3)]
            answers = await asyncio.gather(*tries)
        assert any(answer.retries_taken for answer in answers)
        assert all(answer.parse().choices for answer in answers)
        await gateway.end()


LIMITED = 'tenant = "few"\nrequests_per_minute = 60'


async def test_a_timeout_leaves_nothing_behind(
    stack: RunningStack, client: openai.AsyncOpenAI
) -> None:
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(
            **GREEDY, prompt="Once", max_tokens=4000, timeout=0.5, extra_body={"ignore_eos": True}
        )

    async def is_idle() -> bool:
        stats = await asyncio.to_thread(stack.stats)
        return stats["num_requests_running"] == stats["num_requests_waiting"] == "0"

    async with asyncio.timeout(60):
        while not await is_idle():
            await asyncio.sleep(0.1)


# ---------------------------------------------------------------- responses


RESPONSE: dict[str, Any] = {
    **GREEDY,
    "input": "What is the capital of France?",
    "max_output_tokens": 24,
}


async def test_responses(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(**RESPONSE)
    chat = await client.chat.completions.create(**CHAT)
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.store) == ("completed", False)
    assert answer.usage is not None and chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    said: list[Any] = [
        {"role": "user", "content": RESPONSE["input"]},
        *[item.model_dump(exclude_none=True) for item in answer.output],
        {"role": "user", "content": "Say it again."},
    ]
    again = await client.responses.create(**{**RESPONSE, "input": said}, instructions="Be brief.")
    assert again.output_text
    with pytest.raises(openai.BadRequestError, match="stores no responses"):
        await client.responses.create(**RESPONSE, previous_response_id=answer.id)
    with pytest.raises(openai.BadRequestError) as bad:
        await client.responses.create(**{**RESPONSE, "input": []})
    assert bad.value.param == "input"


async def test_responses_as_a_stream(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(**RESPONSE)
    deltas, numbers = "", []
    async for event in await client.responses.create(**RESPONSE, stream=True):
        numbers.append(event.sequence_number)
        deltas += event.delta if event.type == "response.output_text.delta" else ""
    assert numbers == list(range(len(numbers)))
    assert event.type == "response.completed"
    assert deltas == whole.output_text == event.response.output_text
    async with client.responses.stream(**RESPONSE) as events:
        final = await events.get_final_response()
    assert final.output_text == whole.output_text


async def test_a_type_through_parse_of_responses(client: openai.AsyncOpenAI) -> None:
    asked = {**RESPONSE, "max_output_tokens": 200}
    parsed = await client.responses.parse(**asked, text_format=Order)
    assert isinstance(parsed.output_parsed, Order)
    async with client.responses.stream(**asked, text_format=Order) as events:
        final = await events.get_final_response()
    assert final.output_parsed == parsed.output_parsed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
async def test_tools_of_responses(client: openai.AsyncOpenAI, choice: Any) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    asked = {**RESPONSE, "max_output_tokens": 300, "tools": [tool], "tool_choice": choice}
    asked["parallel_tool_calls"] = False
    answer = await client.responses.create(**asked)
    [call] = answer.output
    assert call.type == "function_call" and call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    async with client.responses.stream(**asked) as events:
        final = await events.get_final_response()
    [streamed] = final.output
    assert streamed.type == "function_call"
    assert streamed.arguments == call.arguments
