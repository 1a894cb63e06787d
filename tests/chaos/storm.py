"""A random storm over a pool of real processes, and proof that it cost nothing.

    python -m tests.chaos.storm [--seed 1] [--requests 500] [--faults 50] [--redis valkey]

Kills, freezes and restarts gateways, schedulers, workers and Redis, rolls Redis back and wipes it,
while clients check every token they are given (`clients`). At the end nothing may be left: no
request, no block, no key that would stay for ever. All choices come from the seed; what the
processes make of them is up to the machine, so a failing seed is a hint and its logs are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.clients import ABORTED_WITH_GATEWAY, Crowd, random_clients
from tests.chaos.pool import Pool, Process
from tests.chaos.sentinels import SentinelPool
from tests.fakes.past_the_bus import command
from wire.bus import BusError

USUAL_START_S = 4.0
"""How long a pool takes to start on two idle cores. Where all takes longer, faults come later: one
after the other would hit what the last one has ended before it is up again, and nobody ever serves.
"""

QUIET_S = 60.0
"""How long after the last client the pool may take to be as if nobody had ever come."""


@dataclass(frozen=True)
class Forecast:
    """How long and how hard it storms."""

    seed: int = 1
    num_requests: int = 500
    num_faults: int = 50
    num_open: int = 40  # clients at a time
    pause_s: tuple[float, float] = (0.2, 1.6)  # between faults
    limit_s: float = 3600.0
    kind: str = "valkey"
    has_sentinels: bool = False  # three servers under three of them, in place of one


@dataclass
class Report:
    """What came of it."""

    forecast: Forecast
    num_requests: int = 0
    num_tokens: int = 0
    num_moves: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    num_epochs: int = 0
    num_failovers: int = 0
    longest_stall_s: float = 0.0
    stalled_by: list[str] = field(default_factory=list)  # what had happened just before or in it
    num_missing_records: int = 0
    start_s: float = 0.0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The figures as one line of JSON."""
        return json.dumps(
            {
                "redis": self.forecast.kind,
                "sentinels": self.forecast.has_sentinels,
                "seed": self.forecast.seed,
                "requests": self.num_requests,
                "tokens": self.num_tokens,
                "ends": dict(self.ends),
                "faults": sum(self.faults.values()),
                "by_kind": dict(self.faults),
                "moves": self.num_moves,
                "epochs": self.num_epochs,
                "failovers": self.num_failovers,
                "longest_stall_s": round(self.longest_stall_s, 1),
                "stalled_by": self.stalled_by,
                "missing_records": self.num_missing_records,
                "start_s": round(self.start_s, 1),
                "seconds": round(self.seconds),
                "violations": len(self.violations),
            }
        )


class Weather:
    """Brings faults about. Every one ends by itself: what was frozen is thawed again."""

    def __init__(self, pool: Pool, draw: random.Random, report: Report) -> None:
        self._pool = pool
        self._draw = draw
        self._faults = report.faults
        self.diary: list[tuple[float, str]] = []
        self._sizes: deque[tuple[float, Path, int]] = deque(maxlen=400)  # of Redis's log
        self.has_forgotten = pool.may_forget  # or Redis was rolled back or wiped
        is_watched = isinstance(pool, SentinelPool)
        num_kills = 9 if is_watched else 3
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "kill gateway": (4, lambda: self._kill(draw.choice(pool.gateways))),
            "kill leader": (4, self._kill_leader),
            "kill standby": (1, self._kill_standby),
            "kill worker": (5, lambda: self._kill(draw.choice(pool.workers))),
            "kill Redis": (num_kills, lambda: pool.restart_redis(draw.uniform(0, 0.8))),
            "kill both schedulers": (1, lambda: self._kill_all(pool.schedulers)),
            "kill both workers": (1, lambda: self._kill_all(pool.workers)),
            "freeze gateway": (1, lambda: self._freeze(draw.choice(pool.gateways))),
            "freeze leader": (3, self._freeze_leader),
            "freeze worker": (3, lambda: self._freeze(draw.choice(pool.workers))),
            "freeze Redis": (2, lambda: pool.freeze_redis(draw.uniform(0.5, 2.5))),
            "cut Redis's log": (3, self._cut),
            "wipe Redis": (1, self._wipe),
            "flush scripts": (1, lambda: self._order("SCRIPT", "FLUSH")),
            "kill connections": (1, lambda: self._order("CLIENT", "KILL", "TYPE", "normal")),
        }
        if is_watched:  # what a replica lacks is roll-back enough
            del self._kinds["cut Redis's log"], self._kinds["wipe Redis"]

    async def rage(self, is_enough: Callable[[int], bool], pause_s: tuple[float, float]) -> None:
        """Bring one fault after another about, now and then two at once, until it is enough."""
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        number = 0
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch_log())
            while not is_enough(number):
                await asyncio.sleep(self._draw.uniform(*pause_s))
                for name in self._draw.choices(
                    names, weights, k=2 if self._draw.random() < 0.2 else 1
                ):
                    self._faults[name] += 1
                    self.diary.append((time.monotonic(), name))
                    number += 1
                    group.create_task(self._kinds[name][1]())  # type: ignore[arg-type]  # all are coroutines
            watching.cancel()

    # ------------------------------------------------------------ one fault each

    async def _kill(self, process: Process | None) -> None:
        if process is not None:
            process.kill()

    async def _kill_all(self, processes: list[Process]) -> None:
        for process in processes:
            process.kill()

    async def _kill_leader(self) -> None:
        await self._kill(await self._pool.leader())

    async def _kill_standby(self) -> None:
        await self._kill(await self._pool.standby())

    async def _freeze(self, process: Process | None) -> None:
        if process is not None:
            process.freeze()
            await asyncio.sleep(self._draw.uniform(0.3, 3.0))
            process.thaw()

    async def _freeze_leader(self) -> None:
        await self._freeze(await self._pool.leader())

    async def _cut(self) -> None:
        """Redis forgets up to the last second, or as little as the last few bytes."""
        self.has_forgotten = True
        since = time.monotonic() - self._draw.choice((0.0, 0.1, 0.4, 1.0))
        log = self._pool.aof()
        size = log.stat().st_size if log is not None else 0
        earlier = [size for at, path, size in self._sizes if at <= since and path == log]
        keep = earlier[-1] if earlier else 0
        keep += self._draw.randrange(0, 2000)
        self._sizes.clear()
        await self._pool.cut_redis(max(0, min(keep, size - 1)), self._draw.uniform(0, 0.5))

    async def _wipe(self) -> None:
        self.has_forgotten = True
        self._sizes.clear()
        await self._pool.restart_redis(self._draw.uniform(0, 0.5), wipe=True)

    async def _order(self, *words: str) -> None:
        async with self._pool.redis_is_busy:
            try:
                await command(self._pool.bus, *words)
            except BusError:  # it is away, or cut us off as well
                return

    async def _watch_log(self) -> None:
        """Note how long Redis's log was when, so that a cut can be as long as a second."""
        while True:
            if (log := self._pool.aof()) is not None:
                self._sizes.append((time.monotonic(), log, log.stat().st_size))
            await asyncio.sleep(0.05)


class Storm:
    """One run."""

    def __init__(self, forecast: Forecast) -> None:
        self.forecast = forecast
        self.report = Report(forecast)
        self._draw = random.Random(forecast.seed)
        cls = SentinelPool if forecast.has_sentinels else Pool
        self._pool = cls(forecast.kind, preemption_mode="auto", orphan_grace_s=60)
        for _ in range(2):
            self._pool.add_scheduler()
            self._pool.add_worker(
                *("--step-ms", "3", "--num-blocks", "48", "--num-cpu-blocks", "24")
            )
        for _ in range(3):
            self._pool.add_gateway()
        self._crowd = Crowd(self._pool.gateways, random.Random(forecast.seed + 1))
        self._weather = Weather(self._pool, self._draw, self.report)

    async def run(self) -> Report:
        """Storm until there were enough requests and enough faults, then look at what is left."""
        started, report = time.monotonic(), self.report
        try:
            async with self._pool.running():
                try:
                    async with asyncio.timeout(self.forecast.limit_s):
                        await self._pool.ready()
                        report.start_s = time.monotonic() - started
                        await self._rage()
                        await self._settle()
                except TimeoutError:
                    self._tell_unfinished()
        finally:
            report.seconds = time.monotonic() - started
            self._sum_up()
            await self._pool.close(keep_logs=bool(report.violations))
            if report.violations:
                sys.stderr.write(self.how_to_repeat())
        return report

    def how_to_repeat(self) -> str:
        """What to type to see it again, and where to look."""
        f = self.forecast
        again = (
            f"python -m tests.chaos.storm --seed {f.seed} --requests {f.num_requests} "
            f"--faults {f.num_faults} --redis {f.kind}{' --sentinels' * f.has_sentinels}"
        )
        return f"again: {again}\nlogs:  {self._pool.folder}\n"

    # ------------------------------------------------------------ while it storms

    async def _rage(self) -> None:
        forecast, crowd = self.forecast, self._crowd
        num_asked = 0

        def is_enough(num_faults: int) -> bool:
            return num_faults >= forecast.num_faults and num_asked >= forecast.num_requests

        async with asyncio.TaskGroup() as group:
            slowness = max(1.0, self.report.start_s / USUAL_START_S)
            shortest, longest = (slowness * pause for pause in forecast.pause_s)
            raging = group.create_task(self._weather.rage(is_enough, (shortest, longest)))
            stalling = group.create_task(self._watch_stalls())
            clients = random_clients(random.Random(forecast.seed + 2))
            while not raging.done():
                if len(crowd.open) < forecast.num_open:
                    await crowd.ask(next(clients))
                    num_asked += 1
                await asyncio.sleep(0.005)
            await crowd.all_done()
            stalling.cancel()

    async def _watch_stalls(self) -> None:
        """Longest time in which nobody got anything."""
        num_tokens, since = 0, time.monotonic()
        while True:
            await asyncio.sleep(0.05)
            if self._crowd.num_tokens != num_tokens:
                num_tokens, since = self._crowd.num_tokens, time.monotonic()
            stall = time.monotonic() - since
            if stall > self.report.longest_stall_s:
                self.report.longest_stall_s = stall
                diary = self._weather.diary
                self.report.stalled_by = [name for at, name in diary if at > since - 1]

    def _tell_unfinished(self) -> None:
        for client in list(self._crowd.open.values()):
            self.report.violations.append(
                f"{client.req_id} never ended: {len(client.tokens)} of {len(client.want)} tokens, "
                f"at {client.gateway.name if client.gateway else 'no gateway'}"
            )
        self.report.violations.append(f"not over after {self.forecast.limit_s:g} s")

    # ------------------------------------------------------------ when it is over

    async def _settle(self) -> None:
        """Wait until the pool is empty; what then is left must be allowed to be."""
        try:
            await self._pool.until(self._pool.is_quiet, QUIET_S)
        except TimeoutError:
            self.report.violations.append(f"not quiet: {await self._pool.unrest()}")
        await self._check_records()

    async def _check_records(self) -> None:
        """What Redis says of each request is what its client got."""
        for client in self._crowd.done:
            record = await self._pool.bus.request(client.req_id)
            if "status" not in record or client.end in {ABORTED_WITH_GATEWAY, "abort"}:
                self.report.num_missing_records += "status" not in record
                continue
            (data,) = await self._pool.bus.tokens([client.req_id])
            want = b"".join(token.to_bytes(4, "little") for token in client.want)
            if record["status"] != "finished" or data != want:
                self.report.violations.append(f"{client.req_id}: the record is {record}")
        if self.report.num_missing_records and not self._weather.has_forgotten:
            self.report.violations.append(f"{self.report.num_missing_records} records are gone")

    def _sum_up(self) -> None:
        report, crowd = self.report, self._crowd
        report.num_requests = len(crowd.done) + len(crowd.open)
        report.num_tokens = crowd.num_tokens
        report.num_moves = crowd.num_moves
        report.num_failovers = getattr(self._pool, "num_failovers", 0)
        report.ends = Counter(str(client.end) for client in crowd.done)
        report.num_epochs = sum(
            one.log.read_text().count("lead_taken") for one in self._pool.schedulers
        )
        report.violations += crowd.violations + self._pool.tracebacks()
        for process in self._pool.processes:
            # A worker whose registration was rolled back finds its name taken, and begins anew.
            allowed = len(re.findall("FENCED", process.log.read_text()))
            report.violations += process.surprises[allowed:]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--redis", default="valkey")
    parser.add_argument("--sentinels", action="store_true", help="three servers, watched")
    parser.add_argument("--limit", type=float, default=3600.0)
    options = parser.parse_args()
    os.environ["PYTHONUNBUFFERED"] = "1"
    report = asyncio.run(
        Storm(
            Forecast(
                seed=options.seed,
                num_requests=options.requests,
                num_faults=options.faults,
                kind=options.redis,
                limit_s=options.limit,
                has_sentinels=options.sentinels,
            )
        ).run()
    )
    sys.stdout.write(f"{report.line()}\n")
    sys.stderr.writelines(f"{violation}\n" for violation in report.violations[:20])
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
