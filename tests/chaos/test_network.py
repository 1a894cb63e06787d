"""The way between one part and Redis is cut for a while: everybody else goes on, nothing is lost.

Twice: through a proxy that holds everything back, and over TCP in network namespaces whose cable is
cut, where packets really vanish and are really sent again.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.chaos import network
from tests.chaos.network import cables
from tests.chaos.pool import Pool
from tests.chaos.scene import Role, Scene
from tests.fakes.redis_proxy import RedisProxy
from tests.fakes.running_stack import free_port

pytestmark = [pytest.mark.chaos, pytest.mark.redis]

ROLES: tuple[Role, ...] = ("gateway", "leader", "standby", "worker")
CUTS_S = [1.0, pytest.param(30.0, marks=pytest.mark.long)]
STEP_MS = 10


async def begin(pool: Pool, options: list[dict[str, Any]]) -> Scene:
    """Two schedulers, two gateways and two workers, each on its own way to Redis."""
    ways = iter(options)
    for _ in range(2):
        pool.add_scheduler(**next(ways))
        pool.add_gateway(**next(ways))
        pool.add_worker("--step-ms", str(STEP_MS), **next(ways))
    return Scene(pool, random.Random(1))


async def who(scene: Scene, role: Role) -> Any:
    clients = await scene.bring_to("decode")
    return await scene.who(role, clients)


@pytest.mark.parametrize("seconds", CUTS_S)
@pytest.mark.parametrize("role", ROLES)
async def test_a_part_that_cannot_reach_redis_costs_no_token(
    role: Role, seconds: float, redis_kind: str
) -> None:
    pool = Pool(redis_kind)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        proxies = [await stack.enter_async_context(RedisProxy(pool.redis.socket)) for _ in range(6)]
        scene = await begin(pool, [{"redis_url": proxy.url} for proxy in proxies])
        way = dict(zip(in_order(pool), proxies, strict=True))
        async with pool.running():
            await pool.ready()
            proxy = way[await who(scene, role)]
            proxy.cut_off()
            await asyncio.sleep(seconds)
            proxy.heal()
            await scene.all_is_well()


@pytest.mark.long
@pytest.mark.root
@pytest.mark.skipif(network.why_impossible() is not None, reason=str(network.why_impossible()))
@pytest.mark.parametrize("seconds", CUTS_S)
@pytest.mark.parametrize("role", ROLES)
async def test_a_cut_cable_costs_no_token(role: Role, seconds: float, redis_kind: str) -> None:
    port = free_port()
    options = {"port": str(port), "bind": "0.0.0.0", "protected-mode": "no"}
    pool = Pool(redis_kind, redis_options=options)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        laid = stack.enter_context(cables(6))
        ways = [
            {"redis_url": f"redis://{cable.host}:{port}/0", "prefix": cable.prefix}
            for cable in laid
        ]
        scene = await begin(pool, ways)
        way = dict(zip(in_order(pool), laid, strict=True))
        async with pool.running():
            await pool.ready()
            cable = way[await who(scene, role)]
            cable.cut()
            await asyncio.sleep(seconds)
            cable.join()
            await scene.all_is_well()


def in_order(pool: Pool) -> list[Any]:
    """The processes as `begin` has made them."""
    columns = (pool.schedulers, pool.gateways, pool.workers)
    return [process for row in zip(*columns, strict=True) for process in row]
