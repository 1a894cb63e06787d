"""A gateway as a process of its own, to be asked, stopped and killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

START_S = 60.0


class GatewayProcess:
    """`python -m gateway` with some settings."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    async def wait_status(self, path: str, status: int) -> None:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(self.url + path) as response:
                        if response.status == status:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)

    async def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Ask it to end; its exit code and what it said."""
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> tuple[int, str]:
        async with asyncio.timeout(START_S):
            _, said = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, said.decode()


Start = Callable[..., Awaitable[GatewayProcess]]


@asynccontextmanager
async def starting(**common: Any) -> AsyncIterator[Start]:
    """Give a way to start gateways; those that still run at the end are killed."""
    started: list[asyncio.subprocess.Process] = []

    async def start(port: int, **options: Any) -> GatewayProcess:
        chosen = {**common, "port": port, **options}
        sets = [f"--set={name.upper()}={value}" for name, value in chosen.items()]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "gateway", *sets, stderr=asyncio.subprocess.PIPE
        )
        started.append(process)
        return GatewayProcess(process, port)

    try:
        yield start
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
                await process.communicate()


async def until_served(url: str, patience_s: float = START_S) -> None:
    """Wait until the gateway has its model, so that it takes requests."""
    async with asyncio.timeout(patience_s), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"{url}/v1/models") as response:
                    [card] = (await response.json())["data"]
                    if card["max_model_len"] is not None:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)
