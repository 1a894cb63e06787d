"""A pool whose Redis is three servers under three Sentinels, the primary of which may die.

Set up as docs/operations.md asks for: a primary that no replica follows takes no writes. What was
killed comes back later, believes that it is the primary still, and is told otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from redis.exceptions import RedisError

from tests.chaos.pool import Pool
from tests.fakes.redis_server import RedisServer
from tests.fakes.sentinels import Watched, say

OPTIONS = {
    "min-replicas-to-write": "1",
    "min-replicas-max-lag": "2",
    "repl-diskless-sync-delay": "0",
}
TIMES_LONGER = 3  # faults last than with one server, so that a fail-over may fit in
PATIENCE_S = 60.0  # of a server that comes back: Sentinels look at it for ten seconds first


class SentinelPool(Pool):
    """Faults of Redis hit whichever server is the primary."""

    may_forget = True
    num_failovers = 0

    def _start_redis(self, kind: str, options: dict[str, str]) -> tuple[RedisServer, str]:
        options = {**options, **OPTIONS}
        self.watched = Watched(kind, num_servers=3, num_sentinels=3, aof=True, options=options)
        return self.watched.servers[0], self.watched.url

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Pool]:
        await self.watched.ready()
        async with super().running():
            yield self

    async def close(self, *, keep_logs: bool = False) -> None:
        if keep_logs:
            self.watched.copy_logs(self.folder)
        await super().close(keep_logs=keep_logs)
        self.watched.close()

    async def keys(self) -> list[tuple[str, int]]:
        await self._find_primary()
        return await super().keys()

    async def restart_redis(self, pause_s: float = 0.0, *, wipe: bool = False) -> None:
        """Kill the primary, and start it again on what it has."""
        assert not wipe, "a primary that comes back with nothing is no case for Sentinels"
        async with self.redis_is_busy:
            await self._find_primary()
            self.redis.kill()
            await asyncio.sleep(TIMES_LONGER * pause_s)
            await asyncio.to_thread(self.redis.start)
            await self._until_all_follow()

    async def freeze_redis(self, seconds: float) -> None:
        """Let the primary hang; when it goes on, another one may have taken its place."""
        async with self.redis_is_busy:
            await self._find_primary()
            self.redis.freeze()
            await asyncio.sleep(TIMES_LONGER * seconds)
            self.redis.thaw()
            await self._until_all_follow()

    async def _find_primary(self) -> None:
        found = await self.watched.primary()
        self.num_failovers += found is not self.redis
        self.redis = found

    async def _until_all_follow(self) -> None:
        """Wait until two servers follow the third, or a fault would find nobody to take over."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(RedisError):
                    await self._find_primary()
                    port = self.watched.ports[self.watched.servers.index(self.redis)]
                    seen = await say(port, "INFO", "replication")
                    if (seen["role"], seen["connected_slaves"]) == ("master", 2):
                        return
                await asyncio.sleep(0.1)
