"""A network between a client and a Redis server that can be made bad on purpose.

Owns the sockets; understands nothing of what passes. What it can do is what networks do: lose a
reply after the command was carried out, hold replies back, cut connections, change bytes, or have
commands arrive twice, as one does that was sent again while the first still was on its way.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_GHOST_S = 0.05  # how long a doubled command may take, or wait for what it reads


class RedisProxy:
    """Listens on a Unix socket and passes everything on to another one."""

    def __init__(self, upstream: Path) -> None:
        self._upstream = upstream
        self._folder = Path(tempfile.mkdtemp(prefix="ps-proxy-"))
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._replies_to_lose = 0
        self._open = asyncio.Event()
        self._open.set()
        self._reaches = asyncio.Event()
        self._reaches.set()
        self._sent = asyncio.Condition()
        self.num_sent = 0  # pieces that clients have sent
        self.doubles = False  # whether each of them is carried out twice
        self.rewrite: Callable[[bytes], bytes] = lambda reply: reply

    async def __aenter__(self) -> RedisProxy:
        self._server = await asyncio.start_unix_server(self._connect, self._folder / "redis.sock")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.release_replies()
        self.heal()
        self.cut()
        await self._server.wait_closed()
        shutil.rmtree(self._folder)

    @property
    def url(self) -> str:
        """Address for REDIS_URL."""
        return f"unix://{self._folder / 'redis.sock'}"

    def lose_replies(self, count: int = 1) -> None:
        """Let the next commands reach the server and cut the connection instead of the reply."""
        self._replies_to_lose = count

    def hold_replies(self) -> None:
        """Keep every reply back until `release_replies`."""
        self._open.clear()

    def release_replies(self) -> None:
        """Pass on what was held back, and all that comes."""
        self._open.set()

    def cut_off(self) -> None:
        """Let nothing through in either direction, and nobody know, until `heal`."""
        self._reaches.clear()

    def heal(self) -> None:
        """Let through what was sent meanwhile, as a network does that sends lost packets again."""
        self._reaches.set()

    def cut(self) -> None:
        """Cut every connection; new ones are welcome."""
        for writer in list(self._writers):
            writer.close()

    async def wait_sent(self, num_sent: int) -> None:
        """Wait until clients have sent so many pieces."""
        async with self._sent:
            await self._sent.wait_for(lambda: self.num_sent >= num_sent)

    async def _connect(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            replies, server = await asyncio.open_unix_connection(self._upstream)
        except OSError:
            client.close()
            return
        self._writers |= {client, server}
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pass_commands(reader, server))
                pumps.create_task(self._pass_replies(replies, client, server))
        except* OSError:
            pass
        finally:
            self._writers -= {client, server}
            client.close()
            server.close()

    async def _pass_commands(
        self, reader: asyncio.StreamReader, server: asyncio.StreamWriter
    ) -> None:
        while piece := await reader.read(1 << 20):
            await self._reaches.wait()
            if self.doubles:
                await self._carry_out(piece)
            server.write(piece)
            await server.drain()
            async with self._sent:
                self.num_sent += 1
                self._sent.notify_all()
        server.close()

    async def _carry_out(self, piece: bytes) -> None:
        """Send a piece on a connection of its own, whose replies nobody hears."""
        replies, server = await asyncio.open_unix_connection(self._upstream)
        server.write(piece)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GHOST_S):
                await replies.read(1 << 20)
        server.close()

    async def _pass_replies(
        self,
        replies: asyncio.StreamReader,
        client: asyncio.StreamWriter,
        server: asyncio.StreamWriter,
    ) -> None:
        while piece := await replies.read(1 << 20):
            await self._open.wait()
            await self._reaches.wait()
            if self._replies_to_lose:
                self._replies_to_lose -= 1
                server.close()
                break
            client.write(self.rewrite(piece))
            await client.drain()
        client.close()
