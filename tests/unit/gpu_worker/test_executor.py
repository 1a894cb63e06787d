"""The device thread: steps in order, and nothing after one that failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch

from gpu_worker import model_loader
from gpu_worker.executor import Executor
from gpu_worker.model_runner import ModelRunner
from tests.fakes import tiny_models
from tests.fakes.step_driver import StepDriver
from wire.config import SettingsError, load
from wire.messages import ModelRunnerOutput, SchedulerOutput
from wire.service import StartupError


@pytest.fixture
async def executor(tiny_folder: Callable[[str], Path]) -> AsyncIterator[Executor]:
    executor = Executor(load(device="cpu", dtype="float32", num_gpu_blocks=64))
    await executor.load(lambda: tiny_folder("llama"))
    yield executor
    executor.close()


def driver() -> StepDriver:
    driver = StepDriver(64, 16)
    driver.add(1, [3, 4, 5])
    return driver


async def test_loading_announces_what_fits(tiny_folder: Callable[[str], Path]) -> None:
    executor = Executor(load(device="cpu", dtype="bfloat16", num_gpu_blocks=3, block_size=32))
    info = await executor.load(lambda: tiny_folder("llama"))
    assert (info.device, info.dtype) == ("cpu", "bfloat16")
    assert (info.capacity.num_blocks, info.capacity.max_model_len) == (3, 96)
    executor.close()


@pytest.mark.parametrize(("activation", "dtype"), [("silu", "bfloat16"), ("gelu", "float32")])
async def test_auto_is_bfloat16_where_only_our_decoder_is_fast_at_it(
    activation: str,
    dtype: str,
    tmp_path: Path,
    kernel_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our decoder does not know gelu."""
    monkeypatch.setattr(model_loader, "processor_features", lambda: {"avx2", "fma"})
    config = tiny_models.llama()
    config.hidden_act = activation
    config.tie_word_embeddings = True
    folder = tiny_models.save(config, tmp_path, dtype=torch.bfloat16)
    executor = Executor(load(device="cpu", num_gpu_blocks=64, model_cache_dir=kernel_folder.parent))
    info = await executor.load(lambda: folder)
    assert info.dtype == dtype
    result = await executor.submit(driver().step(start={1: 3}))
    expected = tiny_models.last_logits(tiny_models.reference(folder), [3, 4, 5]).argmax()
    assert result is not None and list(result.sampled_token_ids) == [int(expected)]
    executor.close()


@pytest.mark.parametrize("error", [StartupError("no"), SettingsError("no")])
async def test_what_cannot_be_loaded_is_reported_to_who_asked(error: Exception) -> None:
    executor = Executor(load(device="cpu"))

    def find_folder() -> Path:
        raise error

    with pytest.raises(type(error)):
        await executor.load(find_folder)
    executor.close()


async def test_steps_run_one_at_a_time_in_the_order_given(executor: Executor) -> None:
    driven = driver()
    steps = [driven.step(start={1: 3}), *(driven.step() for _ in range(5))]
    results = await asyncio.gather(*(executor.submit(step) for step in steps))
    assert [result.step_id for result in results if result] == [1, 2, 3, 4, 5, 6]
    assert all(result and len(result.sampled_token_ids) == 1 for result in results)


async def test_nothing_runs_after_a_failed_step_until_reset(executor: Executor) -> None:
    driven = driver()
    await executor.submit(driven.step(start={1: 3}))
    bad = SchedulerOutput(1, 2, num_decodes=5)
    answers = [executor.submit(bad), executor.submit(SchedulerOutput(1, 3, num_decodes=1))]
    failed, after = await asyncio.gather(*answers)
    assert failed is not None and "num_decodes is 5" in str(failed.failed)
    assert after is not None and "before it" in str(after.failed)
    await executor.reset()
    result = await executor.submit(driver().step(start={1: 3}))
    assert result is not None and result.failed is None
    assert executor.epoch == 1


async def test_an_exception_of_the_model_is_an_answer(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(_runner: ModelRunner, _step: SchedulerOutput) -> ModelRunnerOutput:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ModelRunner, "launch", explode)
    result = await executor.submit(SchedulerOutput(1, 1))
    assert result == ModelRunnerOutput(1, 1, failed="RuntimeError: out of memory")


async def test_the_step_that_runs_can_be_seen(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_end = threading.Event(), threading.Event()

    def slow(_runner: ModelRunner, step: SchedulerOutput) -> ModelRunnerOutput:
        started.set()
        assert may_end.wait(10)
        return ModelRunnerOutput(step.epoch, step.step_id)

    monkeypatch.setattr(ModelRunner, "launch", slow)
    assert executor.running is None
    answer = executor.submit(SchedulerOutput(4, 9))
    await asyncio.to_thread(started.wait, 10)
    assert executor.running is not None
    assert (executor.running.epoch, executor.running.step_id) == (4, 9)
    may_end.set()
    await answer
    assert executor.running is None
