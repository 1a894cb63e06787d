"""Whatever the description of the API allows, or just does not, gets an answer that is no 5xx.

Cases are made by schemathesis from `/openapi.json`; real processes. TEST_CASES in the long form. No
case has a deadline: whoever sets one that cannot be kept is told 503.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.chaos.pool import Pool
from tests.fakes.gateway_process import until_served
from tests.fakes.gateway_world import TOKENIZER
from tests.fakes.installed import python_client
from tests.fakes.oracle_worker import VOCAB
from tests.fakes.running_stack import free_port
from tests.fakes.tokenizers import write_model_folder

pytestmark = [pytest.mark.chaos, pytest.mark.redis]

FACTS = {"vocab_size": VOCAB, "max_position_embeddings": 128}
NUM_BODIES = 5  # operations that take one; the others have few different cases
QUIET_S = 30.0
CONFIG = "/admin/config"  # comes last: its limits would refuse what comes after
# The one would end the gateway; the other says 503, since an oracle serves no model.
NOT_NOW = ("--exclude-path", "/admin/drain", "--exclude-path", "/ready", "--exclude-path", CONFIG)
NUM_CASES = int(os.environ.get("TEST_CASES", "10000"))


async def description(url: str, folder: Path) -> Path:
    """What the API says of itself, in a file, without deadlines."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/openapi.json") as response:
        told = await response.json()
    num_deadlines = 0
    for schema in told["components"]["schemas"].values():
        num_deadlines += schema.get("properties", {}).pop("deadline_ms", None) is not None
    assert num_deadlines
    file = folder / "openapi.json"
    file.write_text(json.dumps(told))
    return file


async def run_cases(program: Path, url: str, folder: Path, count: int, *paths: str) -> int:
    """Run cases of these paths; how many there were. Fails if one got a 5xx."""
    process = await asyncio.create_subprocess_exec(
        *(program, "run", await description(url, folder), "--url", url),
        *("--checks", "not_a_server_error"),
        *("--phases", "coverage,fuzzing", "--max-examples", str(count // NUM_BODIES)),
        # More workers are threads, in which Python 3.11 may fail to parse a lambda.
        *("--workers", "1", "--seed", "1", "--no-shrink", "--continue-on-failure"),
        *("--suppress-health-check", "all", "--request-timeout", "60"),
        *paths,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"NO_COLOR": "1"},
        cwd=folder,
    )
    said = (await process.communicate())[0].decode()
    assert process.returncode == 0, said[-6000:]
    return num_cases(said)


async def statuses(url: str) -> set[int]:
    """Those of all responses so far, as the gateway counts them."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        told = await response.text()
    return {
        int(status)
        for status in re.findall(r'pagestream:http_responses_total\{.*status="(\d+)"', told)
    }


async def is_quiet(pool: Pool) -> bool:
    """Whether nothing is left but a configuration, which can be changed by its operation."""
    unrest = await pool.unrest()
    return set(unrest) <= {"keys"} and unrest.get("keys") in (None, ["config"])


def num_cases(said: str) -> int:
    """Cases that passed, as the program tells at its end."""
    [(generated, passed)] = re.findall(r"(\d+) generated, (\d+) passed", said)
    assert generated == passed
    return int(passed)


@pytest.mark.parametrize("count", [100, pytest.param(NUM_CASES, marks=pytest.mark.long)])
async def test_no_described_request_gets_a_5xx(count: int, redis_kind: str, tmp_path: Path) -> None:
    program = (await asyncio.to_thread(python_client, "schemathesis==4.32.5")) / "schemathesis"
    port = free_port()
    folder = write_model_folder(tmp_path / "oracle", TOKENIZER, config=FACTS)
    settings: dict[str, Any] = {"model": str(folder), "port": port, "max_queued_requests": 10_000}
    pool = Pool(redis_kind, **settings)
    pool.add_scheduler()
    pool.add_worker("--num-blocks", "1000")
    gateway = pool.process("http", ["-P", "-m", "gateway"])
    pool.gateways.append(gateway)
    try:
        async with pool.running():
            await pool.ready()
            url = f"http://127.0.0.1:{port}"
            await until_served(url)
            ran = await run_cases(program, url, tmp_path, count, *NOT_NOW)
            # Most are wrong; none of the others was refused, and they were computed.
            assert 200 in (found := await statuses(url))
            assert not found & {429, 503}
            assert int((await pool.bus.stats())["prompt_tokens_total"]) > min(count, 5000)
            ran += await run_cases(program, url, tmp_path, count, "--include-path", CONFIG)
            assert ran >= count
            try:
                await pool.until(partial(is_quiet, pool), QUIET_S)
            except TimeoutError:
                pytest.fail(f"not quiet: {await pool.unrest()} {await pool.bus.stats()}")
            assert not [surprise for one in pool.processes for surprise in one.surprises]
            assert not pool.tracebacks()
    finally:
        await pool.close()
