"""What a client of the whole stack may rely on: a real model behind real HTTP."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator

import aiohttp
import openai
import psutil
import pytest

from tests.fakes.running_stack import RunningStack

pytestmark = pytest.mark.e2e

MEGABYTE = 2**20


@pytest.fixture
async def client(stack: RunningStack) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{stack.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


async def test_a_seed_makes_a_draw_repeatable(client: openai.AsyncOpenAI) -> None:
    async def draw(seed: int) -> str:
        answer = await client.completions.create(
            model="demo", prompt="Once upon a time", temperature=1.0, seed=seed, max_tokens=12
        )
        return answer.choices[0].text

    first, second, again = await asyncio.gather(draw(1), draw(2), draw(1))
    assert first == again
    assert first != second


async def test_clients_that_vanish_leave_nothing_behind(stack: RunningStack) -> None:
    moments = random.Random(1)
    url = f"http://127.0.0.1:{stack.port}/v1/completions"
    body = {"model": "demo", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}

    async def vanish(number: int) -> None:
        asked = body | {"prompt": f"Tell me {number} stories." * 20, "stream": number % 2 == 0}
        async with aiohttp.ClientSession() as session:
            try:
                async with asyncio.timeout(moments.uniform(0.001, 1.5)):
                    async with session.post(url, json=asked) as reply:
                        await reply.read()
            except TimeoutError:
                return
            pytest.fail("a thousand tokens came in time")

    await asyncio.gather(*(vanish(number) for number in range(10)))

    async def is_idle() -> bool:
        stats = await asyncio.to_thread(stack.stats)
        alive = int(stats["num_requests_waiting"]) + int(stats["num_requests_running"])
        return alive == 0 and stats["free_blocks"] == stats["total_blocks"]

    async with asyncio.timeout(30):
        while not await is_idle():
            await asyncio.sleep(0.1)
    assert "Paris" in await asyncio.to_thread(stack.complete, "The capital of France is")


PROMPT = {"model": "demo", "prompt": "Hi", "max_tokens": 2}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
BAD: dict[str, tuple[str, object, int, str]] = {
    "broken JSON": ("completions", b'{"model": "demo", ', 400, "JSON"),
    "a list": ("completions", [], 400, "object"),
    "NaN": ("completions", b'{"model": "demo", "prompt": "Hi", "temperature": NaN}', 400, "column"),
    "a wrong type": ("completions", PROMPT | {"max_tokens": "many"}, 400, "max_tokens"),
    "out of range": ("completions", PROMPT | {"temperature": -1}, 400, "temperature"),
    "another model": ("completions", PROMPT | {"model": "gpt-9"}, 404, "gpt-9"),
    "no message": ("chat/completions", CHAT | {"messages": []}, 400, "messages"),
    "no prompt": ("completions", {"model": "demo"}, 400, "prompt"),
    "a prompt beyond the context": ("completions", PROMPT | {"prompt": [5] * 99999}, 400, "8192"),
    "a token that is none": ("completions", PROMPT | {"prompt": [10**6]}, 400, "49151"),
    "several greedy choices": ("completions", PROMPT | {"n": 2, "temperature": 0}, 400, "n"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_named_and_harms_nobody(case: str, stack: RunningStack) -> None:
    path, body, status, word = BAD[case]
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://127.0.0.1:{stack.port}/v1/{path}",
            data=payload,
            headers={"Content-Type": "application/json"},
        ) as reply,
    ):
        answer = await reply.json()
    assert reply.status == status
    assert word in answer["error"]["message"]
    await asyncio.to_thread(stack.post, "/v1/completions", PROMPT)


def test_what_waits_for_work_is_small(stack: RunningStack) -> None:
    stack.complete("The capital of France is")
    pids = stack.pids()
    for role, limit in {"gateway": 400, "scheduler": 150}.items():
        size = psutil.Process(pids[role]).memory_info().rss
        assert size < limit * MEGABYTE, f"{role}: {size // MEGABYTE} MB"
