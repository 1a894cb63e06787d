"""The device thread: loads the model and runs steps, one at a time, in the order they come.

The one place where asyncio meets the device. A worker of several devices would be this class with
a thread, or a process, for each of them, all given the same steps.

    event loop      submit 7   submit 8                 answer 7
    device thread   launch 7   launch 8      finish 7 ──┘
    waiting thread             wait for 7 ───┘ wait for 8

The device thread launches what there is, and is never held up by what the device still computes: a
second thread waits for that. Where a step is complete when it has been launched, as on the CPU, it
is finished at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from gpu_worker import kv_cache
from gpu_worker.attention.base import PagedBackend, StaticBackend
from gpu_worker.attention.selector import select_backend
from gpu_worker.block_table import ProtocolError
from gpu_worker.decode_graphs import CudaCapture
from gpu_worker.grammars import GrammarCompiler
from gpu_worker.model_loader import LoadedModel, is_fast, load_model
from gpu_worker.model_runner import Launched, ModelRunner
from gpu_worker.native.library import NoLibraryError
from gpu_worker.native.memory import keep_what_is_freed
from gpu_worker.native_sampler import NativeSampler
from gpu_worker.prepare import prepare
from gpu_worker.request_states import Capacity
from gpu_worker.sampler import Sampler, sample_in_torch
from wire.config import Settings
from wire.messages import ModelRunnerOutput, SchedulerOutput

log = structlog.get_logger()

T = TypeVar("T")
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunningStep:
    """The step that the device executes now."""

    epoch: int
    step_id: int
    started: float  # monotonic seconds


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a loaded worker announces."""

    capacity: Capacity
    device: str
    dtype: str


class Executor:
    """Owns the device thread and, through it alone, everything that lives on the device."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        self._waiting = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device-wait")
        self._free_at_start = kv_cache.free_memory()
        self._runner: ModelRunner | None = None
        self._grammars: GrammarCompiler | None = None
        self._is_broken = False
        self._in_flight: deque[RunningStep] = deque()

    @property
    def running(self) -> RunningStep | None:
        """The oldest step that is not finished."""
        with contextlib.suppress(IndexError):  # it may be finished this very moment
            return self._in_flight[0]
        return None

    @property
    def epoch(self) -> int:
        """The highest epoch seen."""
        return self._runner.epoch if self._runner is not None else 0

    @property
    def runner(self) -> ModelRunner:
        """What runs the steps, once the model is loaded. For the device thread."""
        assert self._runner is not None, "load comes first"
        return self._runner

    async def load(
        self, find_folder: Callable[[], Path], tell: Tell = lambda _: None
    ) -> DeviceInfo:
        """Find the model, load it, make the cache and warm up; `tell` hears what is being done.

        Raises SettingsError or StartupError when that cannot be.
        """
        return await self._run(lambda: self.load_here(find_folder(), tell))

    def submit(self, step: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput | None]:
        """Run a step after those given before; None for one of an epoch that is over.

        A step that fails is answered so, and no step after it is run until `reset`. Its grammars
        are compiled from now on, while the device is still at the steps before.
        """
        if self._grammars is not None:
            for new in step.new_reqs:
                if new.sampling.grammar is not None:
                    self._grammars.begin(new.sampling)
        answer: Future[ModelRunnerOutput | None] = Future()
        self._thread.submit(self._begin, step, answer)
        return asyncio.wrap_future(answer)

    async def reset(self) -> None:
        """Forget every request, and run steps again. Weights and cache stay."""
        await self._run(self._reset)

    def close(self) -> None:
        """End the threads, after what they do now."""
        self._waiting.shutdown(cancel_futures=True)
        self._thread.shutdown(cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()

    # ------------------------------------------------------------ on the device thread

    def _run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    @torch.inference_mode()
    def load_here(self, folder: Path, tell: Tell = lambda _: None) -> DeviceInfo:
        """Load a folder on the calling thread, for a process that has no other use for it."""
        with contextlib.suppress(RuntimeError):  # torch takes it once, and only before any work
            torch.set_num_interop_threads(1)
        keep_what_is_freed()
        model, backend = _prepared(self._settings, folder, tell)
        if self._settings.dtype == "auto" and not is_fast(model):
            log.warning("only_our_decoder_is_fast", dtype=str(model.dtype), instead="float32")
            del model, backend
            as_float32 = self._settings.model_copy(update={"dtype": "float32"})
            model, backend = _prepared(as_float32, folder, tell)
        if isinstance(backend, StaticBackend):
            tell("compiling, and measuring memory")
        capacity = self._fit(model, backend)
        self._grammars = GrammarCompiler(folder, capacity.vocab_size)
        self._runner = self._make_runner(model, backend, capacity)
        tell("warming up")
        self._runner.warm_up()
        return DeviceInfo(capacity, model.device.type, str(model.dtype).removeprefix("torch."))

    def _make_runner(
        self, model: LoadedModel, backend: PagedBackend, capacity: Capacity
    ) -> ModelRunner:
        capture = CudaCapture(model.device) if model.device.type == "cuda" else None
        return ModelRunner(
            model,
            backend,
            capacity,
            self._grammars,
            capture=capture,
            sampler=self._pick_sampler(model.device),
        )

    def _pick_sampler(self, device: torch.device) -> Sampler:
        if device.type == "cpu":
            try:
                return NativeSampler(self._settings.model_cache_dir / "kernels")
            except NoLibraryError as error:
                log.warning("sampling_in_plain_torch", reason=str(error))
        return sample_in_torch

    def _fit(self, model: LoadedModel, backend: PagedBackend) -> Capacity:
        settings = self._settings
        wanted = Capacity(
            num_blocks=0,
            block_size=settings.block_size,
            max_model_len=model.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            vocab_size=model.vocab_size,
            num_cpu_blocks=settings.num_cpu_blocks,
        )
        stored = torch.uint8 if settings.kv_cache_dtype == "fp8" else model.dtype
        block_bytes = kv_cache.bytes_per_block(model.kv_shapes, settings.block_size, stored)
        if model.device.type == "cuda":
            room = self._rehearse(model, backend, wanted, kv_cache.CudaMeter(model.device))
        else:
            budget = kv_cache.cpu_budget(settings, self._free_at_start)
            room = kv_cache.Room(budget, kv_cache.free_memory())
        capacity = kv_cache.fit(settings, wanted, block_bytes, room)
        on_host = capacity.num_blocks * block_bytes if model.device.type == "cpu" else 0
        host_free = kv_cache.free_memory() - on_host
        kv_cache.check_cpu_pool(capacity.num_cpu_blocks, block_bytes, host_free)
        return capacity

    def _rehearse(
        self, model: LoadedModel, backend: PagedBackend, wanted: Capacity, meter: kv_cache.Meter
    ) -> kv_cache.Room:
        """See what memory steps and graphs take, with a cache of one block."""
        trial = replace(wanted, num_blocks=1, num_cpu_blocks=0)
        runners = [self._make_runner(model, backend, trial)]  # nothing else holds it

        def run_largest_steps() -> None:
            runners[0].run_largest_steps()

        def warm_up() -> None:
            runners[0].warm_up()

        return kv_cache.measure(self._settings, meter, run_largest_steps, warm_up, runners.clear)

    def _begin(self, step: SchedulerOutput, answer: Future[ModelRunnerOutput | None]) -> None:
        """Launch a step, and see that it is answered once it is complete."""
        if not answer.set_running_or_notify_cancel():
            return
        launched = self._guarded(step.epoch, step.step_id, lambda: self._launch(step))
        if not isinstance(launched, Launched):
            answer.set_result(launched)
        elif launched.sampled.is_here():
            self._end(launched, answer)
        else:
            self._waiting.submit(self._wait_for, launched, answer)

    def _wait_for(self, launched: Launched, answer: Future[ModelRunnerOutput | None]) -> None:
        with contextlib.suppress(Exception):  # it is raised again when the step is finished
            launched.sampled.numbers()
        self._thread.submit(self._end, launched, answer)

    def _end(self, launched: Launched, answer: Future[ModelRunnerOutput | None]) -> None:
        finish = self.runner.finish
        output = self._guarded(launched.epoch, launched.step_id, lambda: finish(launched))
        self._in_flight.popleft()
        answer.set_result(output)

    def _launch(self, step: SchedulerOutput) -> Launched | ModelRunnerOutput | None:
        if self._is_broken:
            return _failed(step.epoch, step.step_id, "a step before it failed")
        self._in_flight.append(RunningStep(step.epoch, step.step_id, time.monotonic()))
        launched = None
        try:
            launched = self.runner.launch(step)
        finally:
            if not isinstance(launched, Launched):
                self._in_flight.pop()
        return launched

    @torch.inference_mode()
    def _guarded(self, epoch: int, step_id: int, work: Callable[[], T]) -> T | ModelRunnerOutput:
        """Work on a step; if that raises, the step has failed, and none is run after it."""
        try:
            return work()
        except ProtocolError as error:
            self._is_broken = True
            log.error("step_refused", epoch=epoch, step=step_id, error=str(error))
            return _failed(epoch, step_id, f"protocol: {error}")
        except Exception as error:
            self._is_broken = True
            log.exception("step_failed", epoch=epoch, step=step_id)
            return _failed(epoch, step_id, f"{type(error).__name__}: {error}"[:500])

    def _reset(self) -> None:
        self.runner.reset()
        self._in_flight.clear()
        self._is_broken = False


def _prepared(settings: Settings, folder: Path, tell: Tell) -> tuple[LoadedModel, PagedBackend]:
    tell("loading the weights")
    model = load_model(settings, folder)
    backend = select_backend(settings, model.dtype, model.device, model.kv_shapes)
    tell("preparing the weights")
    return prepare(settings, model, backend), backend


def _failed(epoch: int, step_id: int, reason: str) -> ModelRunnerOutput:
    return ModelRunnerOutput(epoch, step_id, failed=reason)
