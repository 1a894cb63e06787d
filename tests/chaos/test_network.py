"""The way between one part and Redis is cut for a while: everybody else goes on, nothing is lost.

Twice: through a proxy that holds everything back, and over TCP in network namespaces whose cable is
cut, where packets really vanish and are really sent again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

import pytest
import pytest_asyncio

from tests.chaos import network
from tests.chaos.network import cables
from tests.chaos.pool import Pool, Process
from tests.chaos.scene import Role, Scene
from tests.fakes.redis_proxy import RedisProxy
from tests.fakes.redis_server import KINDS, find_binary
from tests.fakes.running_stack import free_port

pytestmark = [pytest.mark.chaos, pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]

ROLES: tuple[Role, ...] = ("gateway", "leader", "standby", "worker")
CUTS_S = [1.0, pytest.param(30.0, marks=pytest.mark.long)]
STEP_MS = 10
NUM_PROCESSES = 6
NUM_DOUBLED = 20  # pieces, at the least


class Way(Protocol):
    """What leads to Redis."""

    def cut_off(self) -> None: ...
    def heal(self) -> None: ...


class Country:
    """Two schedulers, two gateways and two workers, each on its own way to Redis."""

    def __init__(self, pool: Pool, ways: Sequence[Way], options: Sequence[dict[str, Any]]) -> None:
        self._way: dict[Process, Way] = {}
        add: list[Callable[..., Process]] = [
            pool.add_scheduler,
            pool.add_gateway,
            lambda **given: pool.add_worker("--step-ms", str(STEP_MS), **given),
        ]
        for number, (way, given) in enumerate(zip(ways, options, strict=True)):
            self._way[add[number % len(add)](**given)] = way
        self.scene = Scene(pool, random.Random(1))

    async def cut(self, role: Role, seconds: float) -> None:
        """Cut off whoever has a role, in the middle of its work, and look whether that cost any."""
        clients = await self.scene.bring_to("decode")
        way = self._way[await self.scene.who(role, clients)]
        way.cut_off()
        await asyncio.sleep(seconds)
        way.heal()
        await self.scene.all_is_well()

    async def double(self, role: Role) -> None:
        """Have all that somebody with a role sends arrive twice, and look whether it is noticed."""
        clients = await self.scene.bring_to("decode")
        way = self._way[await self.scene.who(role, clients)]
        assert isinstance(way, RedisProxy)
        before = way.num_sent
        way.doubles = True
        await way.wait_sent(before + NUM_DOUBLED)
        await self.scene.all_is_well()
        way.doubles = False


def any_kind() -> str:
    kind = next((kind for kind in KINDS if find_binary(kind)), None)
    if kind is None:
        pytest.skip("no Redis server is installed")
    return kind


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def behind_proxies() -> AsyncIterator[Country]:
    pool = Pool(any_kind())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        proxies = [
            await stack.enter_async_context(RedisProxy(pool.redis.socket))
            for _ in range(NUM_PROCESSES)
        ]
        country = Country(pool, proxies, [{"redis_url": proxy.url} for proxy in proxies])
        await stack.enter_async_context(pool.running())
        await pool.ready()
        yield country


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def over_cables() -> AsyncIterator[Country]:
    if (reason := network.why_impossible()) is not None:
        pytest.skip(reason)
    port = free_port()
    given = {"port": str(port), "bind": "0.0.0.0", "protected-mode": "no"}
    pool = Pool(any_kind(), redis_options=given)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        laid = stack.enter_context(cables(NUM_PROCESSES))
        options = [
            {"redis_url": f"redis://{cable.host}:{port}/0", "prefix": cable.prefix}
            for cable in laid
        ]
        country = Country(pool, laid, options)
        await stack.enter_async_context(pool.running())
        await pool.ready()
        yield country


@pytest.mark.parametrize("seconds", CUTS_S)
@pytest.mark.parametrize("role", ROLES)
async def test_a_part_that_cannot_reach_redis_costs_no_token(
    role: Role, seconds: float, behind_proxies: Country
) -> None:
    await behind_proxies.cut(role, seconds)


@pytest.mark.parametrize("role", ROLES)
async def test_what_arrives_twice_is_done_once(role: Role, behind_proxies: Country) -> None:
    await behind_proxies.double(role)


@pytest.mark.root
@pytest.mark.parametrize("seconds", CUTS_S)
@pytest.mark.parametrize("role", ROLES)
async def test_a_cut_cable_costs_no_token(role: Role, seconds: float, over_cables: Country) -> None:
    await over_cables.cut(role, seconds)
