"""A pool brought to a moment, so that a fault can be put exactly there."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Literal

from tests.chaos.clients import Client, Crowd
from tests.chaos.pool import Pool, Process

Moment = Literal["idle", "prefill", "decode", "swapped"]
Role = Literal["gateway", "leader", "standby", "worker", "redis"]
MOMENTS: tuple[Moment, ...] = ("idle", "prefill", "decode", "swapped")
ROLES: tuple[Role, ...] = ("gateway", "leader", "standby", "worker", "redis")

POISON = 996
"""First token of a prompt that kills every worker."""

PATIENCE_S = 60.0


class Scene:
    """Clients of a pool, what can happen to it, and the look around afterwards."""

    def __init__(self, pool: Pool, draw: random.Random) -> None:
        self.pool = pool
        self.crowd = Crowd(pool.gateways, draw)
        self._serial = itertools.count(1)

    async def ask(self, prompt_length: int, max_tokens: int, **options: object) -> Client:
        """One more request, unlike all before it."""
        number = next(self._serial)
        prompt = [number % 900 + 1, *[number % 7] * (prompt_length - 1)]
        client = Client(prompt, max_tokens, seed=number, **options)  # type: ignore[arg-type]  # passed on
        return await self.crowd.ask(client)

    async def bring_to(self, moment: Moment) -> list[Client]:
        """Have the pool at this moment of somebody's request; all whose requests are open."""
        if moment == "idle":
            return []
        if moment == "prefill":
            client = await self.ask(320, 20)
            await self.until_record(client, status="running")
            return [client]
        if moment == "decode":
            clients = [await self.ask(20, 60) for _ in range(3)]
            await asyncio.gather(*(client.has(5) for client in clients))
            return clients
        clients = [await self.ask(40, 90) for _ in range(6)]

        async def is_swapped() -> bool:
            return (await self.pool.bus.stats()).get("num_requests_swapped", "0") != "0"

        await self.pool.until(is_swapped, PATIENCE_S)
        return clients

    async def until_record(self, client: Client, **fields: str) -> None:
        """Wait until the pool says so of a request."""

        async def says_so() -> bool:
            record = await self.pool.bus.request(client.req_id)
            return fields.items() <= record.items()

        await self.pool.until(says_so, PATIENCE_S)

    async def who(self, role: Role, clients: list[Client]) -> Process:
        """The process that has a role now; of the gateways one that has clients."""
        if role == "gateway":
            return next((c.gateway for c in clients if c.gateway), self.pool.gateways[0])
        if role == "worker":
            return self.pool.workers[0]
        find: Callable[[], Awaitable[Process | None]] = (
            self.pool.leader if role == "leader" else self.pool.standby
        )
        while (found := await find()) is None:
            await asyncio.sleep(0.01)
        return found

    async def kill(self, role: Role, clients: list[Client]) -> None:
        """End it at once; its supervisor starts it again."""
        if role == "redis":
            await self.pool.restart_redis()
        else:
            await (await self.who(role, clients)).killed()

    async def freeze(self, role: Role, clients: list[Client], seconds: float) -> None:
        """Let it hang for a while."""
        if role == "redis":
            await self.pool.freeze_redis(seconds)
            return
        process = await self.who(role, clients)
        process.freeze()
        await asyncio.sleep(seconds)
        process.thaw()

    async def all_is_well(self) -> None:
        """Every client gets all of its answer and nothing else, new ones too; nothing is left."""
        newcomer = await self.ask(10, 8)
        async with asyncio.timeout(PATIENCE_S):
            await self.crowd.all_done()
        assert not self.crowd.violations
        assert newcomer.tokens == newcomer.want
        try:
            await self.pool.until(self.pool.is_quiet, PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"not quiet: {await self.pool.unrest()}") from None
        await self.pool.ready()
        assert not self.pool.tracebacks()
