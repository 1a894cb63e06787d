"""The worker service on a real Redis with a tiny real model; the test plays the scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.model_runner import ModelRunner
from gpu_worker.service import serve
from tests.fakes import tiny_models
from tests.fakes.past_the_bus import command
from tests.fakes.played_scheduler import NAME, PATIENCE_S, Scheduler, driver_with, generate, until
from tests.fakes.redis_server import RedisServer
from tests.fakes.step_driver import StepDriver
from wire import model_store
from wire.bus import Bus, FencedError
from wire.config import Settings, SettingsError
from wire.messages import ModelRunnerOutput, SchedulerOutput
from wire.progress import Stage
from wire.service import StartupError

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_models.save(tiny_models.llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def settings(make_settings: Callable[..., Settings], folder: Path) -> Settings:
    return make_settings(
        model=str(folder),
        worker_id=NAME,
        device="cpu",
        dtype="float32",
        num_gpu_blocks=64,
        max_num_seqs=8,
    )


@asynccontextmanager
async def running(settings: Settings, stopping: asyncio.Event | None = None) -> AsyncIterator[None]:
    """Run the service while the block lasts, then stop it in order."""
    stopping = stopping or asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve(settings, stopping))
        yield
        stopping.set()
        async with asyncio.timeout(PATIENCE_S):
            await task


@pytest.fixture
def scheduler(bus: Bus) -> Scheduler:
    return Scheduler(bus)


PROMPT = [5, 80, 13, 40, 41, 7]


# ---------------------------------------------------------------- the ordinary


async def test_results_are_the_models_own_tokens(
    settings: Settings, scheduler: Scheduler, folder: Path
) -> None:
    async with running(settings):
        await scheduler.meet()
        found = await generate(scheduler, PROMPT, 20, epoch=1)
    assert found == tiny_models.greedy(tiny_models.reference(folder), PROMPT, 20)


async def test_a_ready_worker_says_what_it_can_hold(
    settings: Settings, scheduler: Scheduler, folder: Path
) -> None:
    async with running(settings):
        fields = await scheduler.meet()
    expected = {
        "state": "ready",
        "model": str(folder),
        "model_hash": model_store.folder_hash(folder),
        "dtype": "float32",
        "device": "cpu",
        "num_blocks": "64",
        "num_cpu_blocks": "0",
        "block_size": "16",
        "max_model_len": "512",
        "vocab_size": str(tiny_models.VOCAB),
        "max_num_seqs": "8",
        "max_num_batched_tokens": "2048",
        "epoch": "0",
        "step": "",
        "step_age_ms": "0",
        "pid": str(os.getpid()),
    }
    assert expected.items() <= fields.items()


async def test_a_new_leader_finds_an_empty_worker(
    settings: Settings, scheduler: Scheduler, bus: Bus
) -> None:
    async with running(settings):
        await scheduler.meet()
        await scheduler.send(driver_with(PROMPT).step(start={1: 6}))
        await scheduler.send(SchedulerOutput(5, 0, is_fence=True))
        _, fence = await scheduler.receive(2)
        assert fence == ModelRunnerOutput(5, 0, held=fence.held)
        assert [held.req for held in fence.held] == [1]  # for the leader to take over
        await scheduler.send(driver_with(PROMPT, epoch=5).step(start={1: 6}))
        assert (await scheduler.receive())[0].failed is None

        async def epoch_is_seen() -> bool:
            return (await bus.processes("worker"))[NAME]["epoch"] == "5"

        await until(epoch_is_seen)


async def test_a_request_that_is_swapped_goes_on_as_if_undisturbed(
    settings: Settings, scheduler: Scheduler, folder: Path
) -> None:
    """All steps are sent at once: only their order keeps the copies right."""
    other = [t + 1 for t in PROMPT] * 6
    async with running(settings.model_copy(update={"num_gpu_blocks": 4, "num_cpu_blocks": 4})):
        fields = await scheduler.meet()
        assert fields["num_cpu_blocks"] == "4"
        driver = StepDriver(4, 16, num_cpu_blocks=4)
        driver.add(1, PROMPT)
        driver.add(2, other)
        steps = [driver.step(start={1: len(PROMPT)}), *(driver.step() for _ in range(12))]
        steps.append(driver.step(swap_out=(1,), start={2: len(other)}))
        await scheduler.send(*steps)
        for result in await scheduler.receive(len(steps)):
            driver.take(result)
        steps = [driver.step(finish=(2,), start={1: 1}), *(driver.step() for _ in range(5))]
        await scheduler.send(*steps)
        results = await scheduler.receive(len(steps))
        for result in results:
            driver.take(result)
        assert results[0].copy_us > 0
    found = driver.requests[1].output
    assert found == tiny_models.greedy(tiny_models.reference(folder), PROMPT, len(found))


# ---------------------------------------------------------------- failures


async def test_a_failed_step_ends_the_incarnation_and_nothing_after_it_runs(
    settings: Settings, scheduler: Scheduler
) -> None:
    async with running(settings):
        first = await scheduler.meet()
        driver = driver_with(PROMPT)
        good, after = driver.step(start={1: 6}), driver.step()
        bad = SchedulerOutput(1, 2, num_decodes=7)
        await scheduler.send(good, bad, SchedulerOutput(1, 3, num_decodes=after.num_decodes))
        answer, failure = await scheduler.receive(2)
        assert answer.failed is None
        assert "num_decodes is 7" in str(failure.failed)
        old = scheduler.process
        second = await scheduler.meet(besides=first["incarnation"])
        assert second["model_hash"] == first["model_hash"]
        assert await Scheduler(scheduler.bus, old).result_ids() == [1, 2]
        assert len(await generate(scheduler, PROMPT, 3, epoch=1)) == 3


async def test_a_step_that_cannot_be_read_is_buried_and_ends_the_incarnation(
    settings: Settings, scheduler: Scheduler, bus: Bus
) -> None:
    async with running(settings):
        fields = await scheduler.meet()
        steps = bus.keys.steps(scheduler.process)
        await command(bus, "XADD", steps, "1-1", "body", "nonsense")
        (failure,) = await scheduler.receive()
        assert "undecodable" in str(failure.failed)
        (dead,) = await bus.newest(bus.keys.dead(), 9)
        assert dead.body == b"nonsense"
        await scheduler.meet(besides=fields["incarnation"])
        assert len(await generate(scheduler, PROMPT, 3, epoch=1)) == 3


async def test_a_redis_that_restarts_empty_finds_the_worker_again(
    settings: Settings, scheduler: Scheduler, redis_server: RedisServer
) -> None:
    async with running(settings):
        await scheduler.meet()
        assert len(await generate(scheduler, PROMPT, 3, epoch=1)) == 3
        redis_server.restart()
        await scheduler.meet()
        assert len(await generate(scheduler, PROMPT, 3, epoch=2)) == 3


async def test_another_process_with_the_name_takes_it_over(
    settings: Settings, scheduler: Scheduler, bus: Bus
) -> None:
    task = asyncio.ensure_future(serve(settings, asyncio.Event()))
    await scheduler.meet()
    await bus.beat("worker", NAME, "other", {"state": "ready", "beats": 1}, ttl_s=60)
    with pytest.raises(FencedError):
        async with asyncio.timeout(PATIENCE_S):
            await task
    assert (await bus.processes("worker"))[NAME]["incarnation"] == "other"


# ---------------------------------------------------------------- while the device is busy


async def test_the_heart_beats_while_a_step_takes_long(
    settings: Settings, scheduler: Scheduler, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def slow(_runner: ModelRunner, step: SchedulerOutput) -> ModelRunnerOutput:
        assert may_end.wait(PATIENCE_S)
        return ModelRunnerOutput(step.epoch, step.step_id)

    async with running(settings):
        await scheduler.meet()
        monkeypatch.setattr(ModelRunner, "launch", slow)
        await scheduler.send(SchedulerOutput(3, 1))
        ages: set[int] = set()

        async def two_beats_of_one_step() -> bool:
            fields = (await bus.processes("worker"))[NAME]
            if fields["step"] == "3-1":
                ages.add(int(fields["step_age_ms"]))
            return len(ages) > 2

        await until(two_beats_of_one_step)
        may_end.set()
        await scheduler.receive()


async def test_a_loading_worker_beats_and_a_stop_ends_it(
    settings: Settings, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()

    def slow(_settings: Settings, tell: model_store.Progress) -> Path:
        assert may_end.wait(PATIENCE_S)
        tell("half way")
        raise AssertionError("went on")

    monkeypatch.setattr(model_store, "ensure", slow)
    stopping = asyncio.Event()
    task = asyncio.ensure_future(serve(settings, stopping))

    async def is_loading() -> bool:
        fields = (await bus.processes("worker")).get(NAME, {})
        return fields.get("state") == "loading" and "num_blocks" not in fields

    await until(is_loading)
    stopping.set()
    may_end.set()
    with pytest.raises(StartupError, match="stopped"):
        async with asyncio.timeout(PATIENCE_S):
            await task
    assert await bus.processes("worker") == {}


async def test_what_a_worker_did_while_it_loaded_is_not_said_of_a_ready_one(
    settings: Settings,
    bus: Bus,
    scheduler: Scheduler,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()

    def slow(_settings: Settings, tell: model_store.Progress) -> Path:
        tell(Stage("converting"))
        assert may_end.wait(PATIENCE_S)
        return folder

    async def is_said() -> bool:
        return (await bus.processes("worker")).get(NAME, {}).get("doing") == "converting"

    monkeypatch.setattr(model_store, "ensure", slow)
    async with running(settings):
        await until(is_said)
        may_end.set()
        fields = await scheduler.meet()
    assert (fields["state"], fields["doing"]) == ("ready", "")


# ---------------------------------------------------------------- the end


async def test_a_stop_finishes_the_steps_in_the_stream_and_leaves_the_roster(
    settings: Settings, scheduler: Scheduler, bus: Bus
) -> None:
    stopping = asyncio.Event()
    async with running(settings, stopping):
        await scheduler.meet()
        driver = driver_with(PROMPT)
        await scheduler.send(driver.step(start={1: 6}), *(driver.step() for _ in range(9)))
        stopping.set()
    assert await scheduler.result_ids() == list(range(1, 11))
    assert await bus.processes("worker") == {}


async def test_a_stop_without_redis_ends_as_well(
    settings: Settings, scheduler: Scheduler, redis_server: RedisServer
) -> None:
    async with running(settings):
        await scheduler.meet()
        redis_server.kill()


@asynccontextmanager
async def process(
    settings: Settings, **others: object
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m gpu_worker` with these settings."""
    given = settings.model_dump(exclude_unset=True)
    assignments = [f"--set={name.upper()}={value}" for name, value in given.items()]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gpu_worker", *assignments),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def test_a_worker_process_serves_and_stops_at_a_signal(
    settings: Settings, scheduler: Scheduler, bus: Bus
) -> None:
    async with process(settings) as child:
        fields = await scheduler.meet()
        assert int(fields["pid"]) == child.pid
        assert len(await generate(scheduler, PROMPT, 3, epoch=1)) == 3
        child.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await child.wait() == 0
    assert await bus.processes("worker") == {}


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        ({"model": "nonsense"}, SettingsError, "MODEL=nonsense"),
        ({"max_model_len": 9999}, SettingsError, "MAX_MODEL_LEN=9999"),
        ({"attention_backend": "triton"}, SettingsError, "ATTENTION_BACKEND=triton"),
        ({"num_gpu_blocks": 2**40}, SettingsError, "NUM_GPU_BLOCKS=.*not enough memory"),
    ],
)
async def test_a_worker_that_cannot_serve_says_why_in_a_sentence(
    wrong: dict[str, Any], error: type[Exception], sentence: str, settings: Settings, bus: Bus
) -> None:
    with pytest.raises(error, match=sentence):
        await serve(settings.model_copy(update=wrong), asyncio.Event())
    assert await bus.processes("worker") == {}
