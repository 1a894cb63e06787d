"""A pool as real processes, each of which can be killed, frozen and started again.

Owns the processes, their folder and their logs; nothing is left after `close`. A supervisor starts
again whatever dies, as `pagestream up` does. Knows nothing of requests: those are `clients`'.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import redis.asyncio

from tests.fakes.redis_server import RedisServer
from wire.bus import Bus, BusDownError, BusError
from wire.config import PREFIX, Settings, load

ROOT = Path(__file__).parents[2]
SCHEDULER = ("-m", "scheduler_svc")
WORKER = ("-m", "tests.fakes.oracle_worker")
GATEWAY = ("-m", "tests.fakes.stream_gateway")

FIXED = {"requests", "log", "epoch", "last_write", "stats", "tenants"}
FIXED |= {"workers", "gateways", "schedulers"}
FIXED |= {"limits", "ended", "events"}  # for people; both streams have a greatest length
"""Keys that every pool has for ever."""

RESTART_PAUSE_S = 0.1
START_S = 180.0  # a busy machine may need long to start so many processes


class Process:
    """One role in the pool, through as many lives as it takes."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environ: dict[str, str],
        folder: Path,
        prefix: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.num_lives = 0
        self.surprises: list[str] = []  # ends that nobody here brought about
        self.is_kept = True
        self.exit_code: int | None = None  # of the life before
        self._command = [*prefix, sys.executable, *arguments]
        self._environ = environ
        self._life: asyncio.subprocess.Process | None = None
        self._is_ours = False  # the end that comes
        self._is_frozen = False
        self._died = asyncio.Event()
        self.on_line: Callable[[dict[str, Any]], None] = lambda _: None
        self.on_death: Callable[[], None] = lambda: None

    @property
    def pid(self) -> int | None:
        """Process id of the life that runs."""
        return None if self._life is None else self._life.pid

    async def keep(self) -> None:
        """Live, again and again, until cancelled."""
        while True:
            if self.is_kept:
                await self._live()
            await asyncio.sleep(RESTART_PAUSE_S)

    async def _live(self) -> None:
        self._is_ours = self._is_frozen = False
        self._died.clear()
        with self.log.open("ab") as log:
            life = await asyncio.create_subprocess_exec(
                *self._command,
                cwd=ROOT,
                env=self._environ,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=1 << 24,
            )
        self._life, self.num_lives = life, self.num_lives + 1
        assert life.stdout is not None
        try:
            while line := await life.stdout.readline():
                if line.endswith(b"\n"):  # else it was killed in the middle
                    self.on_line(json.loads(line))
            code = self.exit_code = await life.wait()
        except asyncio.CancelledError:
            self.kill()
            await life.communicate()
            raise
        finally:
            self._life = None
        if not self._is_ours:
            self.surprises.append(f"{self.name} ended by itself with {code}")
        self._died.set()
        self.on_death()

    def become(self, *arguments: str) -> None:
        """Live the next lives as something else."""
        self._command = [sys.executable, *arguments]

    def say(self, line: dict[str, Any]) -> None:
        """Write to its standard input; lost if it does not live."""
        if self._life is not None and self._life.stdin is not None:
            with suppress(OSError):
                self._life.stdin.write(json.dumps(line).encode() + b"\n")

    def kill(self) -> None:
        """End the life that runs, as a crash would."""
        self._is_ours = True
        self._signal(signal.SIGKILL)

    async def ended(self) -> None:
        """Wait for the end of the life that runs."""
        if self._life is not None:
            await self._died.wait()

    async def killed(self) -> None:
        """End the life that runs, and wait for that."""
        self.kill()
        await self.ended()

    async def stopped(self) -> int | None:
        """Ask the life that runs to end in order, and wait for that; its exit code."""
        self._is_ours = True
        self._signal(signal.SIGTERM)
        await self.ended()
        return self.exit_code

    def freeze(self) -> None:
        """Let it hang: nothing is answered, and the connections stay open."""
        self._is_frozen = True
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._is_frozen = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._life is not None:
            with suppress(ProcessLookupError):
                os.kill(self._life.pid, number)  # Popen's own way may reap it behind asyncio's back


class Pool:
    """Redis with AOF, and the processes around it."""

    may_forget = False
    """Whether Redis may lose what it has acknowledged when it is killed."""

    def __init__(
        self,
        kind: str = "valkey",
        *,
        redis_options: dict[str, str] | None = None,
        **settings: object,
    ) -> None:
        load(**settings)  # so that no server is left if one of them is wrong
        self.folder = Path(tempfile.mkdtemp(prefix="ps-chaos-"))
        options = {"appendfsync": "everysec", **(redis_options or {})}
        self.redis, self.redis_url = self._start_redis(kind, options)
        self.settings: Settings = load(redis_url=self.redis_url, **settings)
        self.bus = Bus.connect(self.settings)
        self.schedulers: list[Process] = []
        self.workers: list[Process] = []
        self.gateways: list[Process] = []
        self.redis_is_busy = asyncio.Lock()  # held by whoever ends it and starts it again
        self._given = {name: str(value) for name, value in settings.items()}

    def _start_redis(self, kind: str, options: dict[str, str]) -> tuple[RedisServer, str]:
        """Give the server that faults will hit, and the address under which all find it."""
        server = RedisServer(kind, aof=True, options=options)
        return server, server.url

    def process(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        redis_url: str | None = None,
        environ: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Process:
        """Make a process of this pool; it lives once it is kept."""
        ours = {PREFIX + key.upper(): value for key, value in self._given.items()}
        ours[f"{PREFIX}REDIS_URL"] = redis_url or self.redis_url
        everything = {**os.environ, "OMP_NUM_THREADS": "1", **ours, **(environ or {})}
        return Process(name, arguments, everything, self.folder, prefix)

    def add_scheduler(self, **options: Any) -> Process:
        self.schedulers.append(
            self.process(f"scheduler{len(self.schedulers)}", SCHEDULER, **options)
        )
        return self.schedulers[-1]

    def add_worker(self, *arguments: str, **options: Any) -> Process:
        name = f"w{len(self.workers)}"
        self.workers.append(self.process(name, [*WORKER, name, *arguments], **options))
        return self.workers[-1]

    def add_gateway(self, **options: Any) -> Process:
        self.gateways.append(self.process(f"gateway{len(self.gateways)}", GATEWAY, **options))
        return self.gateways[-1]

    @property
    def processes(self) -> list[Process]:
        return [*self.schedulers, *self.workers, *self.gateways]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Pool]:
        """Keep every process alive while the block lasts."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(process.keep()) for process in self.processes]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()

    async def close(self, *, keep_logs: bool = False) -> None:
        """End Redis; the logs stay if somebody wants to read them."""
        await self.bus.close()
        self.redis.close()
        if not keep_logs:
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------ who is who

    async def until(self, condition: Callable[[], Any], patience_s: float = 60.0) -> None:
        """Wait for something that announces itself in Redis, which may be away meanwhile."""
        async with asyncio.timeout(patience_s):
            while True:
                with suppress(BusDownError):
                    if await condition():
                        return
                await asyncio.sleep(0.02)

    async def leader(self) -> Process | None:
        """The scheduler process that leads; None if nobody does or nobody knows."""
        return await self._scheduler("leader")

    async def standby(self) -> Process | None:
        """A scheduler process that stands by; None if none does or nobody knows."""
        return await self._scheduler("standby")

    async def _scheduler(self, state: str) -> Process | None:
        try:
            fields = await self.bus.processes("scheduler")
        except BusError:
            return None
        pids = {int(one["pid"]) for one in fields.values() if one.get("state") == state}
        return next((one for one in self.schedulers if one.pid in pids), None)

    async def ready(self, patience_s: float = START_S) -> None:
        """Wait until somebody leads and has every worker."""

        async def is_ready() -> bool:
            names = {
                fields.get("state") for fields in (await self.bus.processes("worker")).values()
            }
            leads = (await self.leader()) is not None
            return leads and names == {"ready"}

        await self.until(is_ready, patience_s)

    # ------------------------------------------------------------ what Redis can suffer

    async def restart_redis(self, pause_s: float = 0.0, *, wipe: bool = False) -> None:
        """Kill Redis and start it on the data that its folder holds, or on none."""
        async with self.redis_is_busy:
            self.redis.kill()
            await asyncio.sleep(pause_s)
            if wipe:
                shutil.rmtree(self.redis.folder / "appendonlydir", ignore_errors=True)
            await asyncio.to_thread(self.redis.start)

    async def cut_redis(self, size: int, pause_s: float = 0.0) -> None:
        """Kill Redis and let it forget all that it wrote beyond `size` bytes of its log."""
        async with self.redis_is_busy:
            self.redis.kill()
            log = self.aof()
            if log is not None and size < log.stat().st_size:
                os.truncate(log, size)
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(self.redis.start)

    async def freeze_redis(self, seconds: float) -> None:
        """Let Redis hang for a while."""
        async with self.redis_is_busy:
            self.redis.freeze()
            await asyncio.sleep(seconds)
            self.redis.thaw()

    def aof(self) -> Path | None:
        """The part of the append-only file that is being written."""
        parts = sorted(
            (self.redis.folder / "appendonlydir").glob("*.incr.aof"),
            key=lambda path: int(path.name.split(".")[-3]),
        )
        return parts[-1] if parts else None

    # ------------------------------------------------------------ what is left

    async def keys(self) -> list[tuple[str, int]]:
        """Every key with its time to live in milliseconds, -1: for ever."""
        client = redis.asyncio.Redis.from_url(self.redis.url, decode_responses=True)
        async with client, client.pipeline(transaction=False) as pipeline:
            keys = [key async for key in client.scan_iter(count=1000)]
            for key in keys:
                pipeline.pttl(key)
            return list(zip(keys, await pipeline.execute(), strict=True))

    async def is_quiet(self) -> bool:
        """Whether the pool is as if nobody had ever come: no request, no block, no lasting key."""
        return not await self.unrest()

    async def unrest(self) -> dict[str, object]:
        """What is there that would not be if nobody had ever come."""
        stats = await self.bus.stats()
        found: dict[str, object] = {
            "requests": (await self.bus.queue_lengths([]))["requests"],
            "running": int(stats.get("num_requests_running", -1)),
            "waiting": int(stats.get("num_requests_waiting", -1)),
            "keys": await self.lasting_keys(),
        }
        for free, total in (
            ("free_blocks", "total_blocks"),
            ("free_cpu_blocks", "total_cpu_blocks"),
        ):
            if stats.get(free) != stats.get(total):
                found[free] = f"{stats.get(free)} of {stats.get(total)}"
        if not int(stats.get("total_blocks", 0)):
            found["workers"] = "none"
        return {name: what for name, what in found.items() if what}

    async def lasting_keys(self) -> list[str]:
        """Keys beyond those of every pool that no time to live will remove."""
        workers = await self.bus.processes("worker")
        alive = [f"{name}.{fields.get('incarnation')}" for name, fields in workers.items()]
        allowed = {f"{kind}:{process}" for kind in ("steps", "results") for process in alive}
        allowed |= {f"cached:{name}" for name in workers}
        prefix = self.bus.keys.named("")
        names = [key.removeprefix(prefix) for key, ttl in await self.keys() if ttl == -1]
        return sorted(set(names) - allowed - FIXED)

    def tracebacks(self) -> list[str]:
        """Whatever a process wrote that only a bug writes."""
        logs = [(one.name, one.log.read_text()) for one in self.processes if one.log.exists()]
        return [
            f"{name}: …{text[text.index('Traceback') - 500 :][:5000]}"
            for name, text in logs
            if "Traceback" in text
        ]


def deadline(seconds: float) -> Callable[[], float]:
    """Seconds that are left, never below 0."""
    end = time.monotonic() + seconds
    return lambda: max(0.0, end - time.monotonic())
