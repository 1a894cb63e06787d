"""The scheduler of one worker, as far as that can tell: tests send steps and take results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.step_driver import StepDriver
from tests.fakes.streams import entries
from wire.bus import Bus, retrying
from wire.codec import decode_as
from wire.messages import ModelRunnerOutput, SchedulerOutput

PATIENCE_S = 120  # a first start compiles kernels
NAME = "w"


async def until(found: Callable[[], Awaitable[Any]]) -> Any:
    """Wait for something that announces itself in Redis only."""
    async with asyncio.timeout(PATIENCE_S):
        while not (value := await found()):
            await asyncio.sleep(0.01)
    return value


@dataclass
class Scheduler:
    """What a scheduler does with one worker, as far as the worker can tell."""

    bus: Bus
    process: str = ""
    results: list[ModelRunnerOutput] = field(default_factory=list)
    _cursor: str = "0-0"

    async def meet(self, *, besides: str = "") -> dict[str, str]:
        """Wait for a ready worker whose incarnation is not `besides`."""

        async def ready() -> dict[str, str]:
            fields = (await retrying(lambda: self.bus.processes("worker"))).get(NAME, {})
            is_new = fields.get("state") == "ready" and fields["incarnation"] != besides
            return fields if is_new else {}

        fields: dict[str, str] = await until(ready)
        self.process = f"{NAME}.{fields['incarnation']}"
        self._cursor = "0-0"
        return fields

    async def send(self, *steps: SchedulerOutput) -> None:
        for step in steps:
            await self.bus.publish_step(self.process, step)

    async def receive(self, count: int = 1) -> list[ModelRunnerOutput]:
        """The next results of this incarnation."""
        key = self.bus.keys.results(self.process)
        reader = self.bus.reader({key: self._cursor})
        found: list[ModelRunnerOutput] = []
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < count:
                for entry in await reader.read(100, count - len(found)):
                    self._cursor = entry.entry_id
                    found.append(decode_as(ModelRunnerOutput, entry.body))
                    assert entry.entry_id == f"{found[-1].epoch}-{found[-1].step_id}"
        await reader.close()
        return found

    async def result_ids(self) -> list[int]:
        found = await entries(self.bus, self.bus.keys.results(self.process))
        return [decode_as(ModelRunnerOutput, entry.body).step_id for entry in found]


def driver_with(prompt: list[int], epoch: int = 1) -> StepDriver:
    driver = StepDriver(64, 16, epoch)
    driver.add(1, prompt)
    return driver


async def generate(scheduler: Scheduler, prompt: list[int], count: int, epoch: int) -> list[int]:
    """Generate with two steps in flight, as one request alone."""
    driver = driver_with(prompt, epoch)
    await scheduler.send(driver.step(start={1: len(prompt)}), driver.step())
    while len(driver.requests[1].output) < count:
        driver.take((await scheduler.receive())[0])
        await scheduler.send(driver.step())
    await scheduler.receive(2)
    return driver.requests[1].output[:count]
