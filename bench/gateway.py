"""What one gateway process gives and costs: tokens a second to 256 streams, CPU, memory.

    python -m bench.gateway [--streams 256] [--tokens 512] [--step-ms 0 20] [--open 2048]

Real processes: Redis, a scheduler, a worker whose device computes nothing, and the gateway over
HTTP; the clients live in this process and count bytes only. Run it on a machine that does nothing
else. Prints one line of JSON a measurement; gates nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.pool import Pool
from tests.fakes.gateway_process import until_served
from tests.fakes.gateway_world import TOKENIZER
from tests.fakes.oracle_worker import VOCAB
from tests.fakes.redis_server import KINDS, find_binary
from tests.fakes.running_stack import free_port
from tests.fakes.tokenizers import write_model_folder

FACTS = {"vocab_size": VOCAB, "max_position_embeddings": 4096}
MEGABYTE = 2**20


class Listener(asyncio.Protocol):
    """Asks for one stream, and counts the events that come."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.num_events = 0
        self.num_bytes = 0
        self.has_begun = asyncio.Event()
        self.is_over = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self.num_events += data.count(b"data: ")
        self.has_begun.set()
        self._tail = (self._tail + data)[-40:]
        if b"[DONE]" in self._tail:
            self.is_over.set()
            self.transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        self.is_over.set()


@asynccontextmanager
async def serving(step_ms: float, num_blocks: int) -> AsyncIterator[tuple[Pool, int]]:
    """A pool with one gateway that speaks HTTP; its port."""
    kind = next(kind for kind in KINDS if find_binary(kind))
    port = free_port()
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model_folder(Path(temporary) / "oracle", TOKENIZER, config=FACTS)
        settings: dict[str, Any] = {"model": str(folder), "port": port}
        pool = Pool(kind, **settings, max_queued_requests=100_000)
        pool.add_scheduler()
        pool.add_worker("--null", "--step-ms", str(step_ms), "--num-blocks", str(num_blocks))
        pool.gateways.append(pool.process("gateway", ["-P", "-m", "gateway"]))
        try:
            async with pool.running():
                await pool.ready()
                await until_served(f"http://127.0.0.1:{port}")
                yield pool, port
        finally:
            await pool.close()


async def ask(port: int, num_streams: int, num_tokens: int, path: str) -> list[Listener]:
    """Open so many streams at once."""
    sampling = {"temperature": 0, "ignore_eos": True, "stream": True}
    if path == "/v1/completions":
        asked = {"prompt": [5, 6, 7], "max_tokens": num_tokens, **sampling}
    else:
        said = [{"role": "user", "content": "hi"}]
        asked = {"messages": said, "max_tokens": num_tokens, **sampling}
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    loop = asyncio.get_running_loop()
    listeners = []
    for _ in range(num_streams):
        _, listener = await loop.create_connection(lambda: Listener(request), "127.0.0.1", port)
        listeners.append(listener)
    return listeners


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def throughput(num_streams: int, num_tokens: int, step_ms: float, path: str) -> None:
    """All streams from their first event to their last."""
    async with serving(step_ms, num_streams * (num_tokens // 16 + 4)) as (pool, port):
        gateway = psutil.Process(pool.gateways[0].pid)
        warm = await ask(port, 8, 16, path)
        await asyncio.gather(*(one.is_over.wait() for one in warm))
        cpu, began = cpu_of(gateway), time.monotonic()
        listeners = await ask(port, num_streams, num_tokens, path)
        await asyncio.gather(*(one.is_over.wait() for one in listeners))
        took, spent = time.monotonic() - began, cpu_of(gateway) - cpu
        total = num_streams * num_tokens
        say(
            "throughput",
            path=path,
            streams=num_streams,
            step_ms=step_ms,
            tokens_per_s=round(total / took),
            events_per_s=round(sum(one.num_events for one in listeners) / took),
            gateway_cpu_us_per_token=round(spent / total * 1e6, 1),
            gateway_cpu_share=round(spent / took, 2),
            bytes_per_token=round(sum(one.num_bytes for one in listeners) / total),
            seconds=round(took, 1),
        )


async def memory(num_streams: int) -> None:
    """What the gateway holds for a stream that is open: those that run, and those that wait."""
    async with serving(50.0, num_streams * 8) as (pool, port):
        gateway = psutil.Process(pool.gateways[0].pid)
        warm = await ask(port, 64, 16, "/v1/completions")
        await asyncio.gather(*(one.is_over.wait() for one in warm))
        before = gateway.memory_info().rss
        listeners = await ask(port, num_streams, 64, "/v1/completions")
        running = listeners[:256]
        await asyncio.gather(*(one.has_begun.wait() for one in running))
        held = gateway.memory_info().rss - before
        say(
            "memory",
            streams=num_streams,
            gateway_mb=round((before + held) / MEGABYTE, 1),
            kb_per_open_stream=round(held / num_streams / 1024, 1),
        )
        for one in listeners:
            one.transport.abort()


def say(label: str, **figures: Any) -> None:
    print(json.dumps({"bench": label, **figures}), flush=True)


async def bench(options: argparse.Namespace) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        for step_ms in options.step_ms:
            await throughput(options.streams, options.tokens, step_ms, path)
    await memory(options.open)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--open", type=int, default=2048)
    asyncio.run(bench(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
