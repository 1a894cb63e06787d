"""Stock models give the same logits through the paged cache as by a full forward of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_worker.model_runner import ModelRunner
from tests.fakes import tiny_models
from tests.fakes.step_driver import StepDriver


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
@torch.inference_mode()
def test_chunks_mixed_batches_and_decodes_equal_full_forwards(
    name: str,
    make_runner: Callable[..., ModelRunner],
    tiny_folder: Callable[[str], Path],
    seen_logits: list[Tensor],
) -> None:
    reference = tiny_models.reference(tiny_folder(name))
    runner = make_runner(name)
    driver = StepDriver(num_blocks=64, block_size=16)
    draw = random.Random(5)
    for req, length in enumerate([1, 15, 16, 17, 70], start=1):
        driver.add(req, [draw.randrange(tiny_models.VOCAB) for _ in range(length)])

    steps = [
        {"start": {5: 33}},  # a first chunk alone
        {"chunks": {5: 7}, "start": {2: 15, 1: 1}},  # a second one, beside whole prompts
        {"chunks": {5: 29}, "start": {3: 16}},  # not yet its end, beside decodes
        {"chunks": {5: 1}, "start": {4: 10}},  # the last token of a prompt alone
        {"chunks": {4: 7}},
        *[{}] * 20,  # over block boundaries, and out of the window
    ]
    num_compared = 0
    for wanted in steps:
        seen_logits.clear()
        result = runner.execute(driver.step(**wanted))  # type: ignore[arg-type]  # dicts of ints
        assert result is not None
        sampled = driver.take(result)
        (logits,) = seen_logits
        for req, row in zip(sampled, logits, strict=True):
            request = driver.requests[req]
            tokens = request.prompt + request.output[:-1]
            expected = tiny_models.last_logits(reference, tokens)
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=2e-5)
            num_compared += 1
    assert num_compared == 2 + 3 + 4 + 5 + 20 * 5
