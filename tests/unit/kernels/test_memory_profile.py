"""What a GPU has for blocks: found by a rehearsal, so that no later step runs out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker import executor as executor_module
from gpu_worker import kv_cache, rehearsal
from gpu_worker.attention.triton import TritonAttention
from gpu_worker.executor import Executor
from gpu_worker.kv_cache import Room
from gpu_worker.model_runner import Launched, ModelRunner
from gpu_worker.request_states import Capacity
from tests.fakes.recorder import Recorder
from wire.config import Settings, SettingsError, load
from wire.messages import NewRequestData

GIB = 1024**3

pytestmark = pytest.mark.usefixtures("no_interpreter")


@dataclass
class FakeMeter:
    """A GPU of 80 GiB on which steps, graphs and what stays have known sizes."""

    used: int = 20 * GIB
    step: int = 5 * GIB
    kernels: int = 1 * GIB  # in use for ever once they have run
    graphs: int = 2 * GIB
    others: int = 0
    trace: list[str] = field(default_factory=list)

    def total(self) -> int:
        return 80 * GIB

    def free(self) -> int:
        return self.total() - self.used

    def peak_of(self, run: Callable[[], object]) -> int:
        run()
        self.used += self.kernels
        return self.step


def measured(meter: FakeMeter, **changes: Any) -> Room:
    settings = load(**changes)

    def capture() -> None:
        meter.used += meter.graphs
        meter.trace.append("graphs")

    def forget() -> None:
        meter.used -= meter.graphs
        meter.trace.append("forgotten")

    run = lambda: meter.trace.append("steps")  # noqa: E731
    return kv_cache.measure(settings, meter, run, capture, forget)


def test_the_cache_gets_what_steps_and_graphs_leave_of_its_share() -> None:
    meter = FakeMeter()
    room = measured(meter, gpu_memory_utilization=0.5)
    assert room == Room(budget=(40 - 21 - 5 - 2) * GIB, free=(80 - 21 - 5 - 2) * GIB)
    assert meter.trace == ["steps", "graphs", "forgotten"]


def test_memory_of_others_is_not_given_out() -> None:
    alone, crowded = measured(FakeMeter()), measured(FakeMeter(used=50 * GIB))
    assert alone.budget - crowded.budget == 30 * GIB


def test_a_size_that_is_set_is_held_against_what_steps_leave() -> None:
    """Not against what is free before them: a step would fail later."""
    room = measured(FakeMeter(), kv_cache_memory_bytes=53 * GIB)
    assert room.budget == 53 * GIB
    wanted = Capacity(0, 16, 64, 8, 64, 100)
    settings = load(kv_cache_memory_bytes=53 * GIB)
    with pytest.raises(SettingsError, match=r"^KV_CACHE_MEMORY_BYTES=.*52\.00 GiB is free"):
        kv_cache.fit(settings, wanted, GIB, room)
    assert kv_cache.fit(settings, wanted, GIB, Room(51 * GIB, room.free)).num_blocks == 51


def test_a_step_that_fits_into_no_memory_is_refused_by_its_settings() -> None:
    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB.\nmore")

    with pytest.raises(SettingsError, match=r"^MAX_NUM_BATCHED_TOKENS=2048 and MAX_NUM_SEQS=256: "):
        kv_cache.measure(load(), FakeMeter(), too_large, lambda: None, lambda: None)


# ---------------------------------------------------------------- what is rehearsed


@pytest.mark.parametrize(
    "capacity",
    [
        Capacity(1, 16, 512, 16, 256, 97),
        Capacity(1, 16, 40, 3, 500, 97),  # more tokens than three requests have
        Capacity(1, 16, 4096, 1, 1, 97),
        Capacity(1, 128, 16, 8, 8, 97),
        Capacity(1, 16, 1, 4, 64, 97),
    ],
    ids=str,
)
def test_the_largest_steps_have_all_rows_and_all_tokens(capacity: Capacity) -> None:
    rows, prompts = rehearsal.largest(capacity)
    assert len(rows) == capacity.max_num_seqs
    room = min(capacity.max_num_batched_tokens, capacity.max_num_seqs * capacity.max_model_len)
    for requests in (rows, prompts):
        assert sum(new.num_scheduled_tokens for new in requests) == room
        assert max(len(new.prompt_token_ids) for new in requests) <= capacity.max_model_len
    assert all(new.sampling.logprobs is not None for new in rows)
    assert all(new.sampling.prompt_logprobs is not None for new in prompts)
    for requests in rehearsal.all_kinds(capacity):
        assert blocks_of(requests) == {0}
        assert sum(new.num_scheduled_tokens for new in requests) <= capacity.max_num_batched_tokens
        assert len(requests) <= capacity.max_num_seqs


def blocks_of(requests: list[NewRequestData]) -> set[int]:
    return {block for new in requests for block in new.block_ids}


@pytest.fixture
def gpu_like(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMeter]:
    """An executor on the CPU that starts as on a GPU: its backend, a recorder, a meter."""
    meter = FakeMeter(used=0, step=0, kernels=0, graphs=0)
    original = Executor._fit

    def fit(self: Executor, model: Any, backend: Any) -> Capacity:
        self._rehearse(model, backend, Capacity(0, 16, 512, 4, 64, model.vocab_size), meter)
        return original(self, model, backend)

    def make_runner(self: Executor, model: Any, backend: Any, capacity: Capacity) -> ModelRunner:
        return ModelRunner(model, backend, capacity, capture=Recorder())

    def select(settings: Settings, dtype: torch.dtype, device: torch.device, _: Any) -> Any:
        return TritonAttention(settings.block_size, dtype, device)

    monkeypatch.setattr(Executor, "_fit", fit)
    monkeypatch.setattr(Executor, "_make_runner", make_runner)
    monkeypatch.setattr(executor_module, "select_backend", select)
    yield meter


async def test_a_rehearsal_runs_real_steps_and_gives_everything_back(
    gpu_like: FakeMeter, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, int]] = []
    launch = ModelRunner.launch

    def watched(self: ModelRunner, step: Any) -> Any:
        tokens = sum(new.num_scheduled_tokens for new in step.new_reqs)
        sizes.append((len(step.new_reqs), tokens))
        launched = launch(self, step)
        assert isinstance(launched, Launched)
        return launched

    monkeypatch.setattr(ModelRunner, "launch", watched)
    settings = load(
        device="cpu",
        dtype="float32",
        num_gpu_blocks=8,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    executor = Executor(settings)
    info = await executor.load(lambda: tiny_folder("llama"))
    assert sizes[:2] == [(4, 64), (1, 64)]  # all rows; all logits of a prompt
    assert info.capacity.num_blocks == 8
    assert executor.runner._graphs is not None
    executor.close()
