"""One pool of real processes for a whole module of tests: each leaves it as it found it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.pool import Pool
from tests.chaos.scene import POISON, Scene
from tests.fakes.redis_server import KINDS, find_binary


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def scene() -> AsyncIterator[Scene]:
    """Two schedulers, two gateways and a worker with little memory, slow enough to be hit."""
    kind = next((kind for kind in KINDS if find_binary(kind)), None)
    if kind is None:
        pytest.skip("no Redis server is installed")
    pool = Pool(kind, preemption_mode="swap", max_num_batched_tokens=32, max_num_seqs=16)
    for _ in range(2):
        pool.add_scheduler()
        pool.add_gateway()
    pool.add_worker(
        *("--step-ms", "10", "--num-blocks", "24", "--num-cpu-blocks", "24"),
        *("--poison", str(POISON)),
    )
    scene = Scene(pool, random.Random(1))
    async with pool.running():
        await pool.ready()
        yield scene
    await pool.close()
