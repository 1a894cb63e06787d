"""What a step costs on the bus: submit, step, result, commit, each awaited on its own.

Run: python bench/bus.py --set REDIS_URL=unix:///path/redis.sock. It fills and empties the pool
`bench` there. Prints the median time of one call in microseconds; gates nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from wire.bus import Bus, Commit
from wire.config import load
from wire.connection import Connection
from wire.messages import (
    CommittedTokens,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    request_numbers,
    token_ids,
)
from wire.service import parse_assignments

ROWS = 256
RETENTION_S = 60
REQS = request_numbers([(1_800_000_000_000 << 21) + n for n in range(ROWS)])
COLUMN = token_ids(list(range(100_000, 100_000 + ROWS)))


def new_commit(num_gateways: int = 1, num_checkpoints: int = 0, num_ends: int = 0) -> Commit:
    """A token for each of 256 requests, and what may come with it."""
    names = [f"{n:032x}" for n in range(ROWS)]
    outputs = EngineCoreOutputs(COLUMN, COLUMN, COLUMN)
    return Commit(
        CommittedTokens(REQS, COLUMN, is_checkpoint=num_checkpoints > 0),
        outputs={f"g{n}.1": outputs for n in range(num_gateways)},
        updates={name: {"status": "finished", "num_output_tokens": 9} for name in names[:num_ends]},
        checkpoints=[(name, 64, bytes(64)) for name in names[:num_checkpoints]],
        ended=[(name, "1-1") for name in names[:num_ends]],
        stats={f"figure_{n}": n for n in range(18)},
    )


async def median_us(call: Callable[[int], Awaitable[object]], repeats: int = 400) -> float:
    """Median of single calls, which are given 1, 2, 3, …"""
    times = []
    for n in range(1, repeats + 1):
        start = time.perf_counter()
        await call(n)
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


async def bench(bus: Bus) -> None:
    """Print one line a kind of call."""
    sampling = SamplingParams(max_tokens=16)

    def submit(_: int) -> Awaitable[object]:
        name = secrets.token_hex(16)
        request = EngineCoreRequest(name, "g0.1", 1, token_ids(list(range(512))), sampling)
        return bus.submit([request], 1_000_000, RETENTION_S)

    epoch, _ = await bus.lead("bench", 3600)
    calls: dict[str, Callable[[int], Awaitable[object]]] = {
        "read a hash (the floor)": lambda _: bus.stats(),
        "submit, 512 tokens": submit,
        "publish_step, batch unchanged": lambda n: bus.publish_step(
            "w.1", SchedulerOutput(epoch, n, num_decodes=ROWS)
        ),
        "publish_result, 256 tokens": lambda n: bus.publish_result(
            "w.1", ModelRunnerOutput(epoch, n, COLUMN)
        ),
    }
    for name, call in calls.items():
        print(f"{name:48} {await median_us(call):8.0f}")
    for name, commit in {
        "commit, 256 rows": new_commit(),
        "commit, 256 rows to 4 gateways": new_commit(num_gateways=4),
        "commit, 256 rows, 8 requests end": new_commit(num_ends=8),
        "commit, 256 rows, 256 checkpoints": new_commit(num_checkpoints=ROWS),
    }.items():
        epoch, _ = await bus.lead("bench", 3600)
        took = await median_us(
            lambda n, epoch=epoch, commit=commit: bus.commit(epoch, n, commit, RETENTION_S)
        )
        print(f"{name:48} {took:8.0f}")


async def main() -> None:
    """Run against the server of the settings, and leave nothing there."""
    settings = load(parse_assignments(sys.argv[1:]), pool="bench")
    bus = Bus.connect(settings)
    try:
        await bench(bus)
    finally:
        keys = bus.keys
        left = [keys.requests(), keys.log(), keys.stats(), keys.epoch(), keys.leader()]
        left += [keys.steps("w.1"), keys.results("w.1"), *(keys.out(f"g{n}.1") for n in range(4))]
        left += [keys.request(f"{n:032x}") for n in range(ROWS)]
        left += [keys.tokens(f"{n:032x}") for n in range(ROWS)]
        async for page in bus.scan(keys.requests()):
            left += [keys.request(entry.fields["id"].decode()) for entry in page]
        await bus.close()
        redis = Connection(settings)
        await redis.command("DEL", *left)
        await redis.close()


if __name__ == "__main__":
    asyncio.run(main())
