"""Does a gateway stay well while it is flooded?

    python -m bench.flood [--idle 5000] [--refused 200] [--seconds 20]

A gateway, a scheduler and Redis as processes, a queue that is full, so many idle connections, and
so many requests a second that are refused with 429. Prints one line of JSON: how long `/health`
took, alone and in the flood, what the gateway's memory was before, in it and after, and how many
requests were answered how. Gates nothing. Needs two file descriptors a connection (`ulimit -n`).
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import quantiles

import aiohttp
import psutil

from tests.chaos.pool import START_S, Pool, Process
from tests.fakes.gateway_pool import FACTS
from tests.fakes.gateway_world import TOKENIZER
from tests.fakes.redis_server import KINDS, find_binary
from tests.fakes.running_stack import free_port
from tests.fakes.tokenizers import write_model_folder

QUEUE = 8
PAUSE_S = 0.05  # between two looks at /health
BODY = {"prompt": [1, 2, 3], "max_tokens": 8}


async def until_it_takes_requests(client: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(START_S):
        while True:
            try:
                async with client.get(f"{url}/v1/models") as response:
                    if (await response.json())["data"][0]["max_model_len"] is not None:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


def probe(port: int, seconds: float) -> list[float]:
    """How long each answer of `/health` took, in milliseconds."""
    took, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        took.append(1000 * (time.perf_counter() - started))
        time.sleep(PAUSE_S)
    return took


async def health(port: int, seconds: float) -> list[float]:
    """Probe from a process of its own: this one is busy with the flood."""
    words = ["-m", "bench.flood", "--probe", str(port), "--seconds", str(seconds)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    took: list[float] = json.loads(said)
    return took


async def refused(
    client: aiohttp.ClientSession, url: str, rate: float, statuses: Counter[int]
) -> None:
    """Ask `rate` times a second, whatever the answers."""

    async def ask() -> None:
        async with client.post(f"{url}/v1/completions", json=BODY) as response:
            await response.read()
            statuses[response.status] += 1

    async with asyncio.TaskGroup() as group:
        due = time.monotonic()
        while True:
            group.create_task(ask())
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))


async def idle(port: int, count: int) -> list[asyncio.StreamWriter]:
    """Connections on which nobody says anything."""
    writers: list[asyncio.StreamWriter] = []
    while len(writers) < count:
        opened = await asyncio.gather(
            *(asyncio.open_connection("127.0.0.1", port) for _ in range(100))
        )
        writers += [writer for _, writer in opened]
    return writers


def summary(took: list[float]) -> dict[str, float]:
    cuts = quantiles(took, n=100)
    return {
        "p50_ms": round(cuts[49], 1),
        "p99_ms": round(cuts[98], 1),
        "max_ms": round(max(took), 1),
    }


async def flood(num_idle: int, rate: float, seconds: float) -> None:
    kind = next(kind for kind in KINDS if find_binary(kind))
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model_folder(Path(folder) / "oracle", TOKENIZER, config=FACTS)
        pool = Pool(kind, model=str(model), port=port, max_queued_requests=QUEUE)
        pool.add_scheduler()
        gateway = pool.process("http", ["-P", "-m", "gateway"])
        pool.gateways.append(gateway)
        try:
            async with pool.running():
                await measure(gateway, port, num_idle, rate, seconds)
        finally:
            await pool.close()


async def measure(gateway: Process, port: int, num_idle: int, rate: float, seconds: float) -> None:
    url, statuses = f"http://127.0.0.1:{port}", Counter[int]()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as client, asyncio.TaskGroup() as group:
        await until_it_takes_requests(client, url)
        waiting = [group.create_task(wait_in_line(client, url)) for _ in range(QUEUE)]
        await asyncio.sleep(1.0)
        process = psutil.Process(gateway.pid)
        memory = {"before_mb": process.memory_info().rss}
        alone = await health(port, min(seconds, 5.0))
        writers = await idle(port, num_idle)
        memory["idle_mb"] = process.memory_info().rss
        flooding = group.create_task(refused(client, url, rate, statuses))
        cpu = process.cpu_times()
        flooded = await health(port, seconds)
        used = sum(process.cpu_times()[:2]) - sum(cpu[:2])
        memory["flooded_mb"] = process.memory_info().rss
        for task in [flooding, *waiting]:
            task.cancel()
        for writer in writers:
            writer.close()
        await asyncio.sleep(2.0)
        memory["after_mb"] = process.memory_info().rss
        figures = {
            "idle": len(writers),
            "refused_per_s": round(statuses[429] / seconds),
            "statuses": dict(statuses),
            "health_alone": summary(alone),
            "health_flooded": summary(flooded),
            "gateway_cpu": round(used / seconds, 2),
            **{name: round(value / 1e6) for name, value in memory.items()},
        }
        print(json.dumps(figures))


async def wait_in_line(client: aiohttp.ClientSession, url: str) -> None:
    """One of those who fill the queue: there is no worker."""
    async with client.post(f"{url}/v1/completions", json=BODY) as response:
        await response.read()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--idle", type=int, default=5000)
    parser.add_argument("--refused", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--probe", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe is not None:
        print(json.dumps(probe(options.probe, options.seconds)))
        return 0
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(flood(options.idle, options.refused, options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
