"""The worker as a service: registers, reads steps, gives them to the device, publishes results.

    steps:<worker>.<incarnation> ──> feed ──> device thread ──> answer ──> results:<…>
                                      (at most two steps wait)

Owns the worker's incarnations. One lasts until a step fails: nothing after that step is executed,
what the cache holds is given up, and the worker registers anew with the weights it has. Input and
output happen here, on the event loop; the device thread never waits for Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from gpu_worker.executor import DeviceInfo, Executor
from gpu_worker.traces import StepTraces
from wire import model_store
from wire.bus import Bus, BusDownError, Entry, FencedError, Reader
from wire.codec import WireError, decode_as
from wire.config import Settings, new_incarnation, process_id
from wire.messages import ModelRunnerOutput, SchedulerOutput
from wire.progress import Stage
from wire.service import HEARTBEAT_S, StartupError, connect, heartbeat
from wire.traces import Tracing, open_tracing

log = structlog.get_logger()

T = TypeVar("T")

_BLOCK_MS = round(HEARTBEAT_S * 1000)  # longest wait for a step; how soon a stop is noticed
_PAUSE_S = 0.1  # before Redis is asked again

Answer = asyncio.Future[ModelRunnerOutput | None]


async def serve(settings: Settings, stopping: asyncio.Event) -> None:
    """Execute steps until told to stop, or until another process takes the name."""
    name = settings.worker_id or process_id("worker")
    tracing = open_tracing(settings, "worker", name)
    bus = await connect(settings, stopping)
    worker = Worker(settings, bus, stopping, name, tracing)
    is_replaced = False
    try:
        await worker.run()
    except FencedError as error:
        is_replaced = True
        log.warning("worker_replaced", why=str(error))
        raise
    finally:
        if not is_replaced:  # else the name on the roster is the other's
            await worker.leave()
        worker.close()
        await bus.close()
        if tracing is not None:
            await tracing.close()
        log.info("worker_stopped")


class Worker:
    """One worker process and its incarnations, one at a time."""

    def __init__(
        self,
        settings: Settings,
        bus: Bus,
        stopping: asyncio.Event,
        name: str,
        tracing: Tracing | None = None,
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._stopping = stopping
        self._name = name
        self._tracing = tracing
        self._traces: StepTraces | None = None  # of this incarnation
        self._executor = Executor(settings)
        self._info: DeviceInfo | None = None  # once the model is loaded
        self._model_hash = ""
        self._doing = ""  # while it loads

    async def run(self) -> None:
        """Live one incarnation after another, until told to stop."""
        is_over = False
        while not is_over:
            incarnation = new_incarnation()
            async with self._beating(incarnation):
                if self._info is None:
                    await self._load()
                is_over = await self._work(f"{self._name}.{incarnation}")
            await self._executor.reset()

    async def leave(self) -> None:
        """Be off the roster, so that nobody waits for this worker's heart to stop."""
        with suppress(BusDownError):
            await self._bus.leave("worker", self._name)

    def close(self) -> None:
        """End the device thread."""
        self._executor.close()

    # ------------------------------------------------------------ who this is

    @asynccontextmanager
    async def _beating(self, incarnation: str) -> AsyncIterator[None]:
        """Be on the roster as this incarnation while the block lasts."""
        ttl_s = 3 * self._settings.worker_timeout_s
        beat = heartbeat(self._bus, "worker", self._name, incarnation, self._beat_fields, ttl_s)
        try:
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(beat)
                yield
                beating.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    def _beat_fields(self) -> dict[str, str | int]:
        fields: dict[str, str | int] = {
            "model": self._settings.model_name,
            "epoch": self._executor.epoch,
        }
        info, running = self._info, self._executor.running
        if info is None:
            doing = self._doing
            return {**fields, "state": "loading", "doing": doing, "step": "", "step_age_ms": 0}
        age_s = time.monotonic() - running.started if running else 0
        return {
            **fields,
            "state": "draining" if self._stopping.is_set() else "ready",
            "doing": "",  # in place of what was done while it loaded
            "model_hash": self._model_hash,
            "dtype": info.dtype,
            "device": info.device,
            "num_blocks": info.capacity.num_blocks,
            "num_cpu_blocks": info.capacity.num_cpu_blocks,
            "block_size": info.capacity.block_size,
            "max_model_len": info.capacity.max_model_len,
            "vocab_size": info.capacity.vocab_size,
            "max_num_seqs": info.capacity.max_num_seqs,
            "max_num_batched_tokens": info.capacity.max_num_batched_tokens,
            "step": f"{running.epoch}-{running.step_id}" if running else "",
            "step_age_ms": round(age_s * 1000),
        }

    async def _load(self) -> None:
        started = time.monotonic()
        self._info = await self._executor.load(self._find_folder, self._note_doing)
        log.info(
            "model_loaded",
            model=self._settings.model_name,
            seconds=round(time.monotonic() - started, 1),
            device=self._info.device,
            dtype=self._info.dtype,
            num_blocks=self._info.capacity.num_blocks,
            max_model_len=self._info.capacity.max_model_len,
        )

    def _note_doing(self, what: str) -> None:
        """Say it with the next heartbeat. From any thread."""
        self._doing = what

    def _find_folder(self) -> Path:
        """Convert or fetch the model if need be; on the device thread."""

        def tell(stage: Stage) -> None:
            if self._stopping.is_set():
                raise StartupError("stopped while the model was being prepared")
            if not stage.num_done:  # how far it is stands in the heartbeat
                log.info("model_prepared", what=str(stage))
            self._note_doing(str(stage))

        try:
            folder = model_store.ensure(self._settings, tell)
        except model_store.ModelMissing as error:
            raise StartupError(str(error)) from None
        self._model_hash = model_store.folder_hash(folder)
        return folder

    # ------------------------------------------------------------ one incarnation's work

    async def _work(self, process: str) -> bool:
        """Execute the steps of this incarnation; True if told to stop, False if one failed."""
        log.info("worker_ready", process=process)
        if self._tracing is not None:
            self._traces = StepTraces(self._tracing, process)
        answers: asyncio.Queue[Answer | None] = asyncio.Queue(maxsize=1)
        reader = self._bus.reader({self._bus.keys.steps(process): "0-0"}, _BLOCK_MS)
        try:
            async with asyncio.TaskGroup() as group:
                feeding = group.create_task(self._feed(reader, answers))
                is_over = await self._answer(process, answers)
                feeding.cancel()
        finally:
            await reader.close()
            if self._traces is not None:
                self._traces.close()
        return is_over

    async def _feed(self, reader: Reader, answers: asyncio.Queue[Answer | None]) -> None:
        """Give steps to the device. One that cannot be read is the last of this incarnation."""
        async for entry in self._entries(reader):
            try:
                step = decode_as(SchedulerOutput, entry.body)
            except WireError as error:
                log.error("step_undecodable", entry=entry.entry_id, error=str(error))
                await self._reach(partial(self._bus.bury, entry, str(error)))
                await answers.put(_refusal(entry, error))
                return
            if self._traces is not None:
                self._traces.submitted(step)
            await answers.put(self._executor.submit(step))
        await answers.put(None)

    async def _entries(self, reader: Reader) -> AsyncIterator[Entry]:
        """Steps as they come; once told to stop, those that are there already."""
        while True:
            is_last = self._stopping.is_set()
            entries = await self._reach(partial(reader.read, 0 if is_last else _BLOCK_MS))
            for entry in entries or ():
                yield entry
            if is_last and not entries:
                return

    async def _answer(self, process: str, answers: asyncio.Queue[Answer | None]) -> bool:
        """Publish results in order; True at the end of the steps, False after one that failed."""
        while (answer := await answers.get()) is not None:
            result = await answer
            if self._traces is not None:
                self._traces.answered(result)
            if result is None:  # of an epoch that is over: nobody waits for it
                continue
            await self._reach(partial(self._bus.publish_result, process, result))
            if result.failed is not None:
                return False
        return True

    async def _reach(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat a harmless call until Redis answers; None if it does not and we are to stop."""
        while True:
            try:
                return await call()
            except BusDownError:
                if self._stopping.is_set():
                    return None
            await asyncio.sleep(_PAUSE_S)


def _refusal(entry: Entry, error: WireError) -> Answer:
    """The answer to a step that nobody can read."""
    epoch, _, step_id = entry.entry_id.partition("-")
    answer: Answer = asyncio.get_running_loop().create_future()
    answer.set_result(ModelRunnerOutput(int(epoch), int(step_id), failed=f"undecodable: {error}"))
    return answer
