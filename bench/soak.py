"""Does anything grow? A pool under steady load for a long time, and its memory now and then.

    python -m bench.soak [--minutes 20] [--open 24] [--step-ms 5] [--kill-s 30]

Real processes and oracle workers; every answer is checked. Of each role there are two: one is
killed now and then, the other lives from the beginning to the end, so that its memory can be judged
as well. Each line of output is a look at the pool. The last one says how fast each figure grew over
the last two thirds of the time. The exit code is 1 if that was more than 1 % an hour and more than
the slack below, or if the keys at the end are not those of an idle pool that has just started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from statistics import median

import psutil
import redis.asyncio

from tests.chaos.clients import Crowd, random_clients
from tests.chaos.pool import FIXED, Pool
from tests.fakes.redis_server import KINDS, find_binary

LOOK_S = 5.0
FADE_S = 120.0  # streams of the dead live for a minute
GROWTH_PER_HOUR = 0.01
SLACK = {"keys": 100, "connections": 10, "stream_entries": 1000}
SLACK_BYTES = 2_000_000
"""What a figure may gain in that time, whatever it was."""

Look = dict[str, float]


async def soak(minutes: float, num_open: int, step_ms: float, kill_s: float) -> bool:
    """Whether nothing grew, nothing was left, and every answer was right."""
    kind = next(kind for kind in KINDS if find_binary(kind))
    pool = Pool(kind, retention_s=5)
    for _ in range(2):
        pool.add_scheduler()
        pool.add_gateway()
        pool.add_worker("--step-ms", str(step_ms), "--num-blocks", "64", "--num-cpu-blocks", "32")
    crowd = Crowd(pool.gateways, random.Random(1))
    looks: list[Look] = []
    try:
        async with pool.running():
            await pool.ready()
            await pool.until(pool.is_quiet)
            at_first = await kinds_of_keys(pool)
            async with asyncio.TaskGroup() as group:
                work = [feed(crowd, num_open), watch(pool, looks), kill(pool, kill_s)]
                tasks = [group.create_task(one) for one in work]
                await asyncio.sleep(60 * minutes)
                for task in tasks:
                    task.cancel()
            await crowd.all_done()
            left = await what_is_left(pool, at_first)
    finally:
        await pool.close()
    growths = {name: growth(name, looks) for name in looks[0] if name != "seconds"}
    grown = sorted(name for name, (_, is_too_much) in growths.items() if is_too_much)
    say(
        tokens=crowd.num_tokens,
        violations=crowd.violations,
        gained={name: round(gained) for name, (gained, _) in growths.items()},
        grown=grown,
        kills=sum(process.num_lives - 1 for process in pool.processes),
        left=left,
    )
    return not grown and not crowd.violations and not left


async def feed(crowd: Crowd, num_open: int) -> None:
    clients = random_clients(random.Random(2))
    while True:
        while len(crowd.open) < num_open:
            await crowd.ask(next(clients))
        crowd.forget_done()
        await asyncio.sleep(0.02)


async def kill(pool: Pool, every_s: float) -> None:
    draw = random.Random(3)
    mortal = [pool.schedulers[0], pool.gateways[0], pool.workers[0]]
    while True:
        await asyncio.sleep(every_s)
        draw.choice(mortal).kill()


async def kinds_of_keys(pool: Pool) -> Counter[str]:
    """How many keys there are of each kind, but for those that every pool has for ever."""
    prefix = pool.bus.keys.named("")
    names = [key.removeprefix(prefix) for key, _ in await pool.keys()]
    return Counter(name.split(":")[0] for name in names if name not in FIXED)


async def what_is_left(pool: Pool, at_first: Counter[str]) -> Counter[str]:
    """Keys more than at first, once there was time for them to go."""
    deadline = time.monotonic() + FADE_S
    while True:
        left = await kinds_of_keys(pool) - at_first
        if not left or time.monotonic() > deadline:
            return left
        await asyncio.sleep(1.0)


async def watch(pool: Pool, looks: list[Look]) -> None:
    started = time.monotonic()
    while True:
        await asyncio.sleep(LOOK_S)
        seen = await look(pool)
        looks.append({"seconds": round(time.monotonic() - started), **seen})
        say(**looks[-1])


async def look(pool: Pool) -> Look:
    """The figures that must not grow."""
    seen: Look = {}
    async with redis.asyncio.Redis.from_url(pool.redis.url, decode_responses=True) as client:
        info = await client.info()
        keys = [key for key, _ in await pool.keys()]
        streams = [key for key in keys if await client.type(key) == "stream"]
        seen["redis_bytes"] = info["used_memory"]
        seen["connections"] = info["connected_clients"]
        seen["keys"] = len(keys)
        seen["stream_entries"] = sum([await client.xlen(key) for key in streams])
    for process in (pool.schedulers[1], pool.gateways[1], pool.workers[1]):
        assert process.pid is not None
        seen[f"{process.name}_bytes"] = psutil.Process(process.pid).memory_info().rss
    return seen


def growth(name: str, looks: list[Look]) -> tuple[float, bool]:
    """What a figure gained over the last two thirds, by the median slope; whether that is too much.

    The slopes are those between each look of the first half of them and its like in the second.
    """
    points = [(one["seconds"], one[name]) for one in looks if name in one]
    points = points[len(points) // 3 :]
    half = len(points) // 2
    if half == 0:
        return 0.0, False
    pairs = zip(points[:half], points[-half:], strict=True)
    slope = median((later[1] - one[1]) / (later[0] - one[0]) for one, later in pairs)
    seconds = points[-1][0] - points[0][0]
    gained, level = slope * seconds, median(value for _, value in points)
    allowed = level * GROWTH_PER_HOUR * seconds / 3600
    return gained, gained > max(allowed, SLACK.get(name, SLACK_BYTES))


def say(**figures: object) -> None:
    print(json.dumps(figures), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--open", type=int, default=24, help="clients at a time")
    parser.add_argument("--step-ms", type=float, default=5.0, help="of the oracle's device")
    parser.add_argument("--kill-s", type=float, default=30.0, help="time between two kills")
    options = parser.parse_args()
    is_flat = asyncio.run(soak(options.minutes, options.open, options.step_ms, options.kill_s))
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
