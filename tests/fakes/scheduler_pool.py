"""The scheduler service on a real Redis, with paged oracles as workers: every answer is known.

The scheduler can be cut off and started again while clients wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from scheduler_svc.service import serve
from tests.fakes.oracle_worker import VOCAB, OracleWorker
from tests.fakes.paged_oracle import generate
from tests.fakes.stream_client import Stream, StreamClient
from wire.config import Settings

PATIENCE_S = 30


def want(stream: Stream) -> list[int]:
    """All tokens that the answer has to have."""
    return generate(stream.prompt, stream.sampling, VOCAB)


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that announces itself nowhere; fails rather than hang."""
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def scheduler(settings: Settings, *, orderly: bool = True) -> AsyncIterator[None]:
    """Run the service while the block lasts; not orderly means that it is cut off."""
    stopping = asyncio.Event()
    task = asyncio.ensure_future(serve(settings, stopping))
    try:
        yield
    finally:
        if orderly:
            stopping.set()
        else:
            task.cancel()
        await asyncio.wait([task])
        if orderly:
            task.result()


@asynccontextmanager
async def pool(
    settings: Settings, num_blocks: int = 64, num_cpu_blocks: int = 0
) -> AsyncIterator[StreamClient]:
    """A scheduler, a worker and a client while the block lasts."""
    worker = OracleWorker(settings, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks)
    async with (
        scheduler(settings),
        worker.running(),
        StreamClient(settings).running() as client,
    ):
        yield client
