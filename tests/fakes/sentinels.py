"""Redis servers that copy one of them, and Sentinels that put another in its place when it dies.

Owns the servers, the Sentinels and their folders; all are gone after `close`. Every server keeps
what it was told to be in a file of its own, as an installation does.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError

from tests.fakes import reaper
from tests.fakes.redis_server import RedisServer, find_binary
from tests.fakes.running_stack import free_port

SERVICE = "main"
HERE = "127.0.0.1"


class Watched:
    """One service: a primary, its replicas, and those who watch. Call `ready` once."""

    def __init__(
        self,
        kind: str,
        *,
        num_servers: int = 2,
        num_sentinels: int = 1,
        aof: bool = False,
        options: dict[str, str] | None = None,
    ) -> None:
        reaper.watch()
        self._kind = kind
        self._folder = Path(tempfile.mkdtemp(prefix="ps-sentinels-"))
        self.ports = [free_port() for _ in range(num_servers)]
        self.sentinel_ports = [free_port() for _ in range(num_sentinels)]
        self.servers = [
            RedisServer(
                kind, aof=aof, options={"port": str(port), **(options or {})}, has_config=True
            )
            for port in self.ports
        ]
        self._sentinels: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """Address for REDIS_URL: whoever is the primary."""
        hosts = ",".join(f"{HERE}:{port}" for port in self.sentinel_ports)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    async def ready(self) -> None:
        """Wait until the replicas follow, and every Sentinel knows them and its like."""
        for port in self.ports[1:]:
            await say(port, "REPLICAOF", HERE, self.ports[0])
            await say(port, "CONFIG", "REWRITE")
            while (await say(port, "INFO", "replication"))["master_link_status"] != "up":
                await asyncio.sleep(0.05)
        for port in self.sentinel_ports:
            self._start_sentinel(port)
        for port in self.sentinel_ports:
            while not await self._knows_all(port):
                await asyncio.sleep(0.1)

    async def primary(self) -> RedisServer:
        """The server that the Sentinels call the primary now."""
        for port in self.sentinel_ports:
            try:
                _, found = await say(port, "SENTINEL GET-MASTER-ADDR-BY-NAME", SERVICE)
            except RedisError:
                continue
            return self.servers[self.ports.index(int(found))]
        raise LookupError("no Sentinel answers")

    def copy_logs(self, folder: Path) -> None:
        """Keep what servers and Sentinels have written."""
        for port, server in zip(self.ports, self.servers, strict=True):
            shutil.copy(server.folder / "log", folder / f"redis-{port}.log")
        for port in self.sentinel_ports:
            shutil.copy(self._folder / str(port) / "log", folder / f"sentinel-{port}.log")

    def close(self) -> None:
        """Kill everything, and remove the folders."""
        for sentinel in self._sentinels:
            sentinel.kill()
            sentinel.wait()
        for server in self.servers:
            server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ inside

    def _start_sentinel(self, port: int) -> None:
        folder = self._folder / str(port)
        folder.mkdir()
        config = folder / "sentinel.conf"
        quorum = len(self.sentinel_ports) // 2 + 1
        config.write_text(
            f"port {port}\ndir {folder}\nlogfile {folder}/log\n"
            f"sentinel monitor {SERVICE} {HERE} {self.ports[0]} {quorum}\n"
            f"sentinel down-after-milliseconds {SERVICE} 1000\n"
            f"sentinel failover-timeout {SERVICE} 2000\n"
        )
        words = [str(find_binary(self._kind)), str(config), "--sentinel"]
        words += ["--set-proc-title", "no"]  # as for the servers
        self._sentinels.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))

    async def _knows_all(self, port: int) -> bool:
        try:
            master = await say(port, "SENTINEL MASTER", SERVICE)
        except RedisError:  # it is starting
            return False
        others = len(self.servers) - 1, len(self.sentinel_ports) - 1
        return (int(master["num-slaves"]), int(master["num-other-sentinels"])) == others


async def say(port: int, *words: str | int) -> Any:
    """Send one command to a server or a Sentinel. Raises RedisError."""
    async with redis.asyncio.Redis(
        host=HERE, port=port, decode_responses=True, protocol=2, socket_timeout=2
    ) as client:
        return await client.execute_command(*words)
