"""A worker process without a model: the paged oracle behind the real streams.

Speaks the step protocol exactly as a real worker does, so that the scheduler service can be tested
with exact answers and without waiting for arithmetic.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.fakes.paged_oracle import PagedOracle
from wire.bus import Bus, retrying
from wire.codec import decode_as
from wire.config import Settings, new_incarnation
from wire.messages import ModelRunnerOutput, SchedulerOutput
from wire.service import heartbeat

VOCAB = 997


class OracleWorker:
    """One life of a worker. Everything it does can be held up or broken by a test."""

    def __init__(
        self,
        settings: Settings,
        name: str = "w",
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        num_cpu_blocks: int = 0,
    ) -> None:
        self.name, self.incarnation = name, new_incarnation()
        self.process = f"{self.name}.{self.incarnation}"
        self.num_steps = 0
        self.may_run = asyncio.Event()
        self.may_run.set()
        self._may_beat = asyncio.Event()
        self._may_beat.set()
        self.fail_next: str | None = None
        self._settings = settings
        self._oracle = PagedOracle(num_blocks, block_size, VOCAB, num_cpu_blocks=num_cpu_blocks)
        self._fields = {
            "state": "ready",
            "num_blocks": num_blocks,
            "num_cpu_blocks": num_cpu_blocks,
            "block_size": block_size,
            "max_model_len": 4096,
            "vocab_size": VOCAB,
            "step_age_ms": 0,
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[OracleWorker]:
        """Live while the block lasts; the end is sudden, like a kill."""
        bus = Bus.connect(self._settings)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._beat(bus)), group.create_task(self._run(bus))]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
        await bus.close()

    def silence(self) -> None:
        """Stop the heartbeat, as a frozen process does."""
        self._may_beat.clear()

    def speak(self) -> None:
        """Let the heart beat again."""
        self._may_beat.set()

    async def _beat(self, bus: Bus) -> None:
        ttl_s = 3 * self._settings.worker_timeout_s
        while True:
            await self._may_beat.wait()
            beating = asyncio.ensure_future(
                heartbeat(bus, "worker", self.name, self.incarnation, self._say, ttl_s)
            )
            try:
                while self._may_beat.is_set():
                    await asyncio.sleep(0.01)
            finally:
                beating.cancel()

    def _say(self) -> dict[str, str | int]:
        return {**self._fields, "epoch": self._oracle.epoch}

    async def _run(self, bus: Bus) -> None:
        reader = bus.reader({bus.keys.steps(self.process): "0-0"})
        try:
            while True:
                for entry in await retrying(reader.read):
                    await self.may_run.wait()
                    step = decode_as(SchedulerOutput, entry.body)
                    result = self._execute(step)
                    await retrying(lambda r=result: bus.publish_result(self.process, r))
        finally:
            await reader.close()

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step.epoch < self._oracle.epoch:
            return ModelRunnerOutput(step.epoch, step.step_id)
        if self.fail_next is not None:
            reason, self.fail_next = self.fail_next, None
            return ModelRunnerOutput(step.epoch, step.step_id, failed=reason)
        self.num_steps += 1
        return self._oracle.execute(step)
