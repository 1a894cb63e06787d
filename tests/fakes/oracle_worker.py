"""A worker without a model: the paged oracle behind the real streams.

Speaks the step protocol exactly as a real worker does, so that the scheduler service can be tested
with exact answers and without waiting for arithmetic. As a process of its own:

    python -m tests.fakes.oracle_worker NAME [--step-ms 5] [--num-blocks 64] [--num-cpu-blocks 0]
        [--null] [--count 1] [--times FILE] [--poison TOKEN] [--set NAME=VALUE …]

With `--null` the device computes nothing at all (see `null_device`), and `--count` workers live in
one process; `--times` writes when each step began, in seconds, at an orderly end. With `--poison` a
request whose prompt begins with that token kills the process, as a bug in a kernel would.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from array import array
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.fakes.null_device import NullDevice
from tests.fakes.paged_oracle import PagedOracle
from wire.bus import Bus, retrying
from wire.codec import decode_as
from wire.config import Settings, new_incarnation
from wire.messages import ModelRunnerOutput, SchedulerOutput
from wire.service import connect, heartbeat, parse_assignments, run

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
        step_s: float = 0.0,
        is_null: bool = False,
        poison: int | None = None,
    ) -> None:
        self.name, self.incarnation = name, new_incarnation()
        self.process = f"{self.name}.{self.incarnation}"
        self.num_steps = 0
        self.may_run = asyncio.Event()  # anything but a fence
        self.may_run.set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._may_beat = asyncio.Event()
        self._may_beat.set()
        self.fail_next: str | None = None
        self.goes_wrong_from: int | None = None  # first token of a prompt that ends in an error
        self._settings = settings
        self._step_s = step_s
        self._poison = poison
        self._device: NullDevice | PagedOracle = (
            NullDevice()
            if is_null
            else PagedOracle(num_blocks, block_size, VOCAB, num_cpu_blocks=num_cpu_blocks)
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._idle_at = 0.0  # when the device is done with all it has begun
        self.begun = array("d")  # when each step began, monotonic seconds
        self._fields = {
            "model": "oracle",
            "num_blocks": num_blocks,
            "num_cpu_blocks": num_cpu_blocks,
            "block_size": block_size,
            "max_model_len": 4096,
            "vocab_size": VOCAB,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
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
        self._thread.shutdown(cancel_futures=True)
        await bus.close()

    def silence(self) -> None:
        """Stop the heartbeat, as a frozen process does."""
        self._may_beat.clear()

    def speak(self) -> None:
        """Let the heart beat again."""
        self._may_beat.set()

    async def leave(self, bus: Bus) -> None:
        """Be off the roster, as after an orderly stop."""
        await bus.leave("worker", self.name)

    # ------------------------------------------------------------ heartbeat

    async def _beat(self, bus: Bus) -> None:
        ttl_s = 3 * self._settings.worker_timeout_s
        while True:
            await self._may_beat.wait()
            async with asyncio.TaskGroup() as group:
                beat = heartbeat(bus, "worker", self.name, self.incarnation, self._say, ttl_s)
                beating = group.create_task(beat)
                while self._may_beat.is_set():
                    await asyncio.sleep(0.01)
                beating.cancel()

    def _say(self) -> dict[str, str | int]:
        return {"state": "ready", **self._fields, "epoch": self._device.epoch}

    # ------------------------------------------------------------ steps

    async def _run(self, bus: Bus) -> None:
        """Give steps to the device ahead of its answers, which are published in order."""
        answers: asyncio.Queue[asyncio.Future[ModelRunnerOutput]] = asyncio.Queue(maxsize=1)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._feed(bus, answers))
            while True:
                result = await (await answers.get())
                await retrying(partial(bus.publish_result, self.process, result))

    async def _feed(
        self, bus: Bus, answers: asyncio.Queue[asyncio.Future[ModelRunnerOutput]]
    ) -> None:
        reader = bus.reader({bus.keys.steps(self.process): "0-0"})
        loop = asyncio.get_running_loop()
        try:
            while True:
                for entry in await retrying(reader.read):
                    step = decode_as(SchedulerOutput, entry.body)
                    await self.may_answer.wait()
                    if not step.is_fence:
                        await self.may_run.wait()
                    await answers.put(loop.run_in_executor(self._thread, self._execute, step))
        finally:
            await reader.close()

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """On the device's thread."""
        if step.epoch < self._device.epoch:
            return ModelRunnerOutput(step.epoch, step.step_id)
        if step.epoch > self._device.epoch and not step.is_fence:  # Redis has forgotten the fence
            return ModelRunnerOutput(step.epoch, step.step_id, failed="no fence opened this epoch")
        if self.fail_next is not None:
            reason, self.fail_next = self.fail_next, None
            return ModelRunnerOutput(step.epoch, step.step_id, failed=reason)
        if any(new.prompt_token_ids[0] == self._poison for new in step.new_reqs):
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(self._device, PagedOracle):
            wrong = [n for n in step.new_reqs if n.prompt_token_ids[0] == self.goes_wrong_from]
            self._device.sick.update(one.req for one in wrong if not one.num_computed_tokens)
        self.num_steps += 1
        started = max(time.monotonic(), self._idle_at)
        self.begun.append(started)
        result = self._device.execute(step)
        self._idle_at = started + (0.0 if step.is_fence else self._step_s)
        time.sleep(max(0.0, self._idle_at - time.monotonic()))
        return replace(result, device_us=max(1, round(self._step_s * 1e6)))


# ---------------------------------------------------------------- as a process


async def serve(options: argparse.Namespace, settings: Settings, stopping: asyncio.Event) -> None:
    """Execute steps until told to stop, or until another process takes a name."""
    workers = [
        OracleWorker(
            settings,
            options.name if options.count == 1 else f"{options.name}-{number}",
            num_blocks=options.num_blocks,
            num_cpu_blocks=options.num_cpu_blocks,
            step_s=options.step_ms / 1000,
            is_null=options.null,
            poison=options.poison,
        )
        for number in range(options.count)
    ]
    bus = await connect(settings, stopping)
    try:
        async with AsyncExitStack() as stack:
            for worker in workers:
                await stack.enter_async_context(worker.running())
            await stopping.wait()
        for worker in workers:
            await worker.leave(bus)
    finally:
        await bus.close()
    if options.times is not None:
        options.times.write_bytes(workers[0].begun.tobytes())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--num-cpu-blocks", type=int, default=0)
    parser.add_argument("--null", action="store_true")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--poison", type=int)
    options, rest = parser.parse_known_args()
    with suppress(KeyboardInterrupt):
        return run("oracle-worker", partial(serve, options), parse_assignments(rest))
    return 130


if __name__ == "__main__":
    sys.exit(main())
