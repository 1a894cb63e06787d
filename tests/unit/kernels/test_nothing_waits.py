"""A step is launched without a look at any number of the device, whose computation it would await.

The device here has shapes and no numbers ("meta"): whoever looks at one fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker.attention.base import KVShape, LayerAttention
from gpu_worker.model_loader import LoadedModel
from gpu_worker.model_runner import Launched, ModelRunner
from gpu_worker.request_states import Capacity
from tests.fakes.recorder import Recorder
from tests.fakes.step_driver import GREEDY, StepDriver
from wire.messages import SamplingParams, SchedulerOutput

META = torch.device("meta")
VOCAB, NUM_BLOCKS = 50, 20
DRAWING = SamplingParams(max_tokens=9, temperature=0.8, top_k=9, top_p=0.9, min_p=0.01)

pytestmark = pytest.mark.usefixtures("no_interpreter")


class NoAttention:
    """A backend of a GPU that keeps nothing."""

    def alloc_kv(self, shapes: Sequence[KVShape], num_blocks: int) -> None: ...

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        return torch.empty(NUM_BLOCKS, 1, device=META), torch.empty(NUM_BLOCKS, 1, device=META)

    def begin_step(self, metadata: Any) -> None: ...

    def begin_static_step(self, decodes: Any) -> None: ...

    def write(self, layer: int, key: Tensor, value: Tensor) -> None: ...

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor: ...  # type: ignore[empty-body]


class NoDecoder:
    """Logits of the right shape."""

    def forward(self, _ids: Tensor, _at: Tensor, logits_indices: Tensor, _backend: Any) -> Tensor:
        return torch.empty(len(logits_indices), VOCAB, device=META)


class OnItsWay:
    """A copy that nobody has waited for."""

    def __init__(self, source: Tensor) -> None:
        assert source.device == META
        self.shape = source.shape

    def is_here(self) -> bool:
        return False

    def numbers(self) -> list[int]:
        raise AssertionError("somebody waits for the device")


def make_runner(recorder: Recorder | None) -> ModelRunner:
    model = LoadedModel(
        module=None,
        device=META,
        dtype=torch.float32,
        kv_shapes=[KVShape(1, 16, 16)],
        attention=[LayerAttention(0.25)],
        vocab_size=VOCAB,
        max_model_len=128,
        decoder=NoDecoder(),
    )
    capacity = Capacity(NUM_BLOCKS, 16, 128, 4, 64, VOCAB)
    runner = ModelRunner(model, NoAttention(), capacity, capture=recorder, copy_out=OnItsWay)
    runner._make_repeatable(runner.backend)  # type: ignore[arg-type]
    return runner


def launch(runner: ModelRunner, step: SchedulerOutput) -> None:
    with torch.inference_mode():
        assert isinstance(runner.launch(step), Launched)


@pytest.mark.parametrize("how", [GREEDY, DRAWING], ids=["greedy", "drawing"])
@pytest.mark.parametrize("is_repeated", [True, False], ids=["graphs", "eager"])
def test_steps_are_launched_without_a_look_at_the_device(
    is_repeated: bool, how: SamplingParams
) -> None:
    recorder = Recorder() if is_repeated else None
    runner = make_runner(recorder)
    driver = StepDriver(NUM_BLOCKS, 16)
    for req in (1, 2, 3):
        driver.add(req, [4] * 15, how)
    launch(runner, driver.step({1: 15, 2: 15, 3: 7}))
    launch(runner, driver.step(chunks={3: 8}))
    for _ in range(3):
        launch(runner, driver.step())
    launch(runner, driver.step(finish=(2,)))
    assert recorder is None or recorder.num_replays == 4


def test_a_rule_for_tokens_does_wait() -> None:
    """So the other test would notice."""
    runner = make_runner(Recorder())
    driver = StepDriver(NUM_BLOCKS, 16)
    driver.add(1, [4] * 3, SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=1.0))
    launch(runner, driver.step({1: 3}))
    with pytest.raises(AssertionError, match="somebody waits"):
        launch(runner, driver.step())
