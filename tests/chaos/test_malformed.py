"""Malformed requests hurt nobody: no 5xx, no process dies, and the neighbours' answers are theirs.

Real processes. 300 requests, and 10,000 in the long form.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.chaos import malformed
from tests.chaos.pool import Pool
from tests.fakes.gateway_pool import FACTS, neutral
from tests.fakes.gateway_process import until_served
from tests.fakes.gateway_world import TOKENIZER
from tests.fakes.running_stack import free_port
from tests.fakes.tokenizers import write_model_folder

pytestmark = [pytest.mark.chaos, pytest.mark.redis]

AT_ONCE = 16
QUIET_S = 30.0
NEIGHBOUR = {"prompt": [1, 2, 3], "max_tokens": 40, "seed": 7, "temperature": 1.0}


async def answer(http: aiohttp.ClientSession, url: str) -> str:
    async with http.post(f"{url}/v1/completions", json=NEIGHBOUR) as response:
        assert response.status == 200, await response.text()
        return neutral(await response.text())


async def throw(port: int, count: int, draw: random.Random) -> Counter[int | None]:
    """So many malformed requests, some at a time; how often each status came."""
    requests, statuses = malformed.messages(draw), Counter[int | None]()

    async def one_after_another() -> None:
        while sum(statuses.values()) < count:
            raw = next(requests)
            status = await malformed.status_of("127.0.0.1", port, raw)
            statuses[status] += 1
            assert status is None or status < 500, raw

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_after_another())
    return statuses


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
async def test_malformed_requests_hurt_nobody(count: int, redis_kind: str, tmp_path: Path) -> None:
    port = free_port()
    folder = write_model_folder(tmp_path / "oracle", TOKENIZER, config=FACTS)
    settings: dict[str, Any] = {"model": str(folder), "port": port, "max_queued_requests": 10_000}
    pool = Pool(redis_kind, **settings)
    pool.add_scheduler()
    pool.add_worker("--step-ms", "1", "--num-blocks", "600")
    gateway = pool.process("http", ["-P", "-m", "gateway"])
    pool.gateways.append(gateway)
    try:
        async with pool.running(), aiohttp.ClientSession() as http:
            await pool.ready()
            url = f"http://127.0.0.1:{port}"
            await until_served(url)
            undisturbed = await answer(http, url)
            throwing = asyncio.ensure_future(throw(port, count, random.Random(count)))
            num_answers = 0
            while not throwing.done():
                assert await answer(http, url) == undisturbed
                num_answers += 1
                await asyncio.sleep(0.05)
            statuses = await throwing
            assert statuses[400] > count / 4, statuses
            assert num_answers > 3
            try:
                await pool.until(pool.is_quiet, QUIET_S)
            except TimeoutError:
                pytest.fail(f"not quiet: {await pool.unrest()}")
            assert not [surprise for one in pool.processes for surprise in one.surprises]
            assert not pool.tracebacks()
    finally:
        await pool.close()
