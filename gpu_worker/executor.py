"""The device thread: loads the model and runs steps, one at a time, in the order they come.

The one place where asyncio meets the device. A worker of several devices would be this class with
a thread, or a process, for each of them, all given the same steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from gpu_worker import kv_cache
from gpu_worker.attention.selector import select_backend
from gpu_worker.block_table import ProtocolError
from gpu_worker.grammars import GrammarCompiler
from gpu_worker.input_batch import Capacity
from gpu_worker.model_loader import LoadedModel, load_model, run_without_cache
from gpu_worker.model_runner import ModelRunner
from gpu_worker.prepare import prepare
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
        self._free_at_start = kv_cache.free_memory()
        self._runner: ModelRunner | None = None
        self._grammars: GrammarCompiler | None = None
        self._is_broken = False
        self.running: RunningStep | None = None

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
        return self._run(lambda: self._execute(step))

    async def reset(self) -> None:
        """Forget every request, and run steps again. Weights and cache stay."""
        await self._run(self._reset)

    def close(self) -> None:
        """End the thread, after what it does now."""
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
        settings = self._settings
        tell("loading the weights")
        model = load_model(settings, folder)
        backend = select_backend(settings, model.dtype, model.device, model.kv_shapes)
        tell("preparing the weights")
        model = prepare(settings, model, backend)
        capacity = self._fit(model)
        self._grammars = GrammarCompiler(folder, capacity.vocab_size)
        self._runner = ModelRunner(model, backend, capacity, self._grammars)
        tell("warming up")
        self._runner.warm_up()
        return DeviceInfo(capacity, model.device.type, str(model.dtype).removeprefix("torch."))

    def _fit(self, model: LoadedModel) -> Capacity:
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
        block_bytes = kv_cache.bytes_per_block(model.kv_shapes, settings.block_size, model.dtype)
        if model.device.type == "cuda":
            largest = settings.max_num_batched_tokens
            budget = kv_cache.cuda_budget(
                settings, model.device, lambda: run_without_cache(model, largest)
            )
            free = torch.cuda.mem_get_info(model.device)[0]
        else:
            budget = kv_cache.cpu_budget(settings, self._free_at_start)
            free = kv_cache.free_memory()
        capacity = kv_cache.fit(settings, wanted, block_bytes, budget, free)
        on_host = capacity.num_blocks * block_bytes if model.device.type == "cpu" else 0
        host_free = kv_cache.free_memory() - on_host
        kv_cache.check_cpu_pool(capacity.num_cpu_blocks, block_bytes, host_free)
        return capacity

    @torch.inference_mode()
    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        if self._is_broken:
            return _failed(step, "a step before it failed")
        self.running = RunningStep(step.epoch, step.step_id, time.monotonic())
        try:
            return self.runner.execute(step)
        except ProtocolError as error:
            self._is_broken = True
            log.error("step_refused", epoch=step.epoch, step=step.step_id, error=str(error))
            return _failed(step, f"protocol: {error}")
        except Exception as error:
            self._is_broken = True
            log.exception("step_failed", epoch=step.epoch, step=step.step_id)
            return _failed(step, f"{type(error).__name__}: {error}"[:500])
        finally:
            self.running = None

    def _reset(self) -> None:
        self.runner.reset()
        self._is_broken = False


def _failed(step: SchedulerOutput, reason: str) -> ModelRunnerOutput:
    return ModelRunnerOutput(step.epoch, step.step_id, failed=reason)
