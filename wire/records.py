"""What stands in Redis, for whoever looks: figures, rosters, records, streams. Changes nothing.

Knows keys and how to read what is under them. Knows nothing of scheduling.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from wire import codec
from wire.config import Settings
from wire.connection import Argument, BusDownError, BusError, Connection
from wire.keys import Keys
from wire.messages import EngineCoreRequest
from wire.stream import Entry, entries_of


class Records:
    """One process's view of a pool. Nothing is connected before the first command."""

    def __init__(self, settings: Settings) -> None:
        self.keys = Keys(settings.pool)
        self._settings = settings
        self._connection = Connection(settings)

    async def close(self) -> None:
        """Close every connection."""
        await self._connection.close()

    # ------------------------------------------------------------ the server

    async def check_server(self) -> str | None:
        """Say in a sentence why this server cannot be used; None if it can.

        Raises BusDownError when it does not answer.
        """
        info = await self._connection.command("INFO", "server")
        version = str(info.get("redis_version", "unknown"))
        major = re.match(r"\d+", version)
        if major is None or int(major[0]) < 7:
            return f"Redis {version} is too old: 7.0 or newer, or Valkey 7.2 or newer, is needed"
        policy = await self._configured("maxmemory-policy")
        if policy not in (None, "noeviction"):
            return f"Redis has maxmemory-policy {policy}: it must be noeviction, or requests vanish"
        return None

    async def is_durable(self) -> bool:
        """Say whether what was accepted survives a restart of Redis; yes, if it does not tell."""
        return await self._configured("appendonly") in (None, "yes")

    # ------------------------------------------------------------ what is there

    async def worker_streams(self) -> dict[str, list[str]]:
        """Find every stream of steps and results that there is, by process. Walks all keys."""
        found: dict[str, list[str]] = {}
        for prefix in (self.keys.steps(""), self.keys.results("")):
            async for key in self._keys_with(prefix):
                found.setdefault(key.removeprefix(prefix), []).append(key)
        return found

    async def processes(self, role: str) -> dict[str, dict[str, str]]:
        """Look up the processes of a role on the roster; a silent one has no fields."""
        roster = await self._hash(self.keys.roster(role))
        commands = [("HGETALL", self.keys.process(role, name)) for name in roster]
        found = await self._connection.commands(commands) if roster else []
        return {name: text(values) for name, values in zip(roster, found, strict=True)}

    async def stats(self) -> dict[str, str]:
        """Read the pool's counters and gauges."""
        return await self._hash(self.keys.stats())

    async def config(self) -> dict[str, str]:
        """Read the settings that were changed while running, and the last change's outcome."""
        return await self._hash(self.keys.config())

    async def tenants(self) -> dict[str, float]:
        """Read the counters of served tokens by tenant, as they were last saved."""
        saved = await self._hash(self.keys.tenants())
        return {name: float(value) for name, value in saved.items()}

    async def server(self) -> dict[str, str]:
        """Read what the server says of itself (`INFO server`)."""
        info = await self._connection.command("INFO", "server")
        return {str(name): str(value) for name, value in info.items()}

    async def queue_lengths(self, workers: Sequence[str]) -> dict[str, int]:
        """Count what is in the queues, by their short names, as in `running:<worker>`."""
        streams = {"requests": self.keys.requests(), "dead": self.keys.dead()}
        mirrors = {"waiting": self.keys.waiting()}
        for worker in workers:
            mirrors[f"running:{worker}"] = self.keys.running(worker)
            mirrors[f"swapped:{worker}"] = self.keys.swapped(worker)
        commands: list[tuple[Argument, ...]] = [("XLEN", key) for key in streams.values()]
        commands += [("ZCARD", key) for key in mirrors.values()]
        counts = await self._connection.commands(commands)
        return dict(zip([*streams, *mirrors], map(int, counts), strict=True))

    async def block_tables(self, worker: str) -> dict[str, list[int]]:
        """Read the mirror of a worker's block tables, by request id."""
        tables = await self._hash(self.keys.blocks(worker))
        return {req_id: [int(block) for block in row.split()] for req_id, row in tables.items()}

    async def cached_blocks(self, worker: str) -> bytes:
        """Read which blocks of a worker are held by nobody and can be hit, as bits."""
        return await self._connection.command("GET", self.keys.cached(worker)) or b""

    async def newest(self, key: str, count: int) -> list[Entry]:
        """Read the last entries of a stream, the oldest of them first."""
        reply = await self._connection.command("XREVRANGE", key, "+", "-", "COUNT", count)
        return entries_of(key, reply)[::-1]

    async def request(self, req_id: str) -> dict[str, str]:
        """Read what is known of a request; empty if nothing is."""
        return await self._hash(self.keys.request(req_id))

    async def tokens(self, req_ids: Sequence[str]) -> list[bytes]:
        """Read the checkpoints of these requests' outputs."""
        if not req_ids:
            return []
        keys = [self.keys.tokens(req_id) for req_id in req_ids]
        values = await self._connection.command("MGET", *keys)
        return [value or b"" for value in values]

    async def submission(self, entry: str) -> EngineCoreRequest | None:
        """Read a request as it was submitted, by its entry; None once it has ended."""
        reply = await self._connection.command("XRANGE", self.keys.requests(), entry, entry)
        for found in entries_of(self.keys.requests(), reply):
            return codec.decode_as(EngineCoreRequest, found.body)
        return None

    async def claim(self, key: str) -> str | None:
        """Read what stands under a client's Idempotency-Key."""
        value = await self._connection.command("GET", key)
        return None if value is None else str(value.decode())

    async def read(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Ask together, for people who look at the mirrors."""
        return await self._connection.commands(commands)

    async def scan(self, key: str, page: int = 256) -> AsyncIterator[list[Entry]]:
        """Walk a whole stream from its first entry, page by page."""
        start = "-"
        while True:
            reply = await self._connection.command("XRANGE", key, start, "+", "COUNT", page)
            if not reply:
                return
            entries = entries_of(key, reply)
            yield entries
            start = f"({entries[-1].entry_id}"

    # ------------------------------------------------------------ inside

    async def _keys_with(self, prefix: str) -> AsyncIterator[str]:
        """Walk all keys for those that begin so; the braces of a pool mean nothing in a pattern."""
        cursor = 0
        while True:
            words = ("SCAN", cursor, "MATCH", f"{prefix}*", "COUNT", 1000)
            found = await self._connection.command(*words)
            cursor, keys = int(found[0]), found[1]
            for key in keys:
                yield key.decode()
            if cursor == 0:
                return

    async def _configured(self, name: str) -> str | None:
        try:
            found = await self._connection.command("CONFIG GET", name)
        except BusDownError:
            raise
        except BusError:  # an account that may not ask, or a service that has no such command
            return None
        return str(found[name]) if name in found else None

    async def _hash(self, key: str) -> dict[str, str]:
        return text(await self._connection.command("HGETALL", key))


def text(values: Mapping[bytes, bytes]) -> dict[str, str]:
    """Read a hash; whoever wrote it may have written anything."""
    return {name.decode(): value.decode(errors="replace") for name, value in values.items()}
