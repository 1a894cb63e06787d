"""The CPU kernel reads through block tables exactly what dense attention would read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.attention.base import KVShape
from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.selector import select_backend
from gpu_worker.attention.torch import TorchAttention
from gpu_worker.native import library
from gpu_worker.native.library import NoLibraryError
from tests.unit.gpu_worker.test_torch_attention import (
    BLOCK,
    CPU,
    MIXED,
    VARIANTS,
    Sequence,
    Step,
    assert_same,
)
from wire.config import SettingsError, load

SHAPE = KVShape(2, 16, 16)
MANY = [Sequence(17 * i % 90, 1) for i in range(32)]  # so many that heads go together


@pytest.fixture
def new_step(kernel_folder: Path) -> Any:
    return partial(Step, make_backend=lambda size, dtype: CpuAttention(size, dtype, kernel_folder))


@pytest.mark.parametrize("how", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_the_kernel_equals_dense_attention(
    how: Any, num_kv_heads: int, dtype: torch.dtype, tolerance: float, new_step: Any
) -> None:
    step = new_step(MIXED, KVShape(num_kv_heads, 16, 16), num_heads=6, dtype=dtype)
    assert_same(step.run(how), step.dense(how), tolerance)


@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (32, 16)])
def test_every_head_size_is_compiled_for_itself(dims: tuple[int, int], new_step: Any) -> None:
    step = new_step(MIXED, KVShape(2, *dims), num_heads=6)
    assert_same(step.run(VARIANTS["plain"]), step.dense(VARIANTS["plain"]), 1e-5)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("num_sequences", [1, 3, 7])
def test_no_batch_size_or_block_boundary_is_special(
    length: int, num_sequences: int, new_step: Any
) -> None:
    step = new_step([Sequence(length - 1, 1)] * num_sequences, SHAPE, num_heads=6)
    assert_same(step.run(VARIANTS["plain"]), step.dense(VARIANTS["plain"]), 1e-5)


@pytest.mark.parametrize("how", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("num_kv_heads", [2, 6, 12])
def test_heads_that_go_together_equal_dense_attention(
    how: Any, num_kv_heads: int, new_step: Any
) -> None:
    if how.sinks is not None:
        how = replace(how, sinks=how.sinks.repeat(2))
    step = new_step(MANY, KVShape(num_kv_heads, 16, 16), num_heads=12)
    assert_same(step.run(how), step.dense(how), 1e-5)


@pytest.mark.parametrize("num_heads", [1, 7, 8, 9, 13, 24])  # more than a tile has rows, at last
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_size_of_a_group_is_special(num_heads: int, dtype: torch.dtype, new_step: Any) -> None:
    step = new_step(MIXED, KVShape(1, 16, 16), num_heads=num_heads, dtype=dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert_same(step.run(VARIANTS["plain"]), step.dense(VARIANTS["plain"]), tolerance)


def test_a_request_full_of_nan_harms_only_itself(new_step: Any) -> None:
    step = new_step(MIXED, SHAPE, num_heads=6)
    for sick in (0, 6):
        step.keys[sick].fill_(torch.nan)
        step.queries[sick].fill_(torch.nan)
    found, expected = step.run(VARIANTS["plain"]), step.dense(VARIANTS["plain"])
    for sick in (6, 0):
        assert found.pop(sick).isnan().any()
        expected.pop(sick)
    assert_same(found, expected, 1e-5)


@pytest.mark.parametrize("batch", [MIXED, MANY], ids=["mixed", "many"])
def test_a_row_says_the_same_in_every_batch(batch: list[Sequence], new_step: Any) -> None:
    step = new_step(batch, SHAPE, num_heads=6)
    together = step.run(VARIANTS["plain"])
    for i, sequence in enumerate(batch):
        alone = new_step([sequence], SHAPE, num_heads=6)
        alone.keys, alone.values = [step.keys[i]], [step.values[i]]
        alone.queries = [step.queries[i]]
        alone._write(0, [sequence.cached])
        assert torch.equal(alone.run(VARIANTS["plain"])[0], together[i])


def test_what_was_compiled_once_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.load("attention", tmp_path, DK=16, DV=16)
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    library.load("attention", tmp_path, DK=16, DV=16)


def test_without_a_compiler_plain_torch_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    settings = load(model_cache_dir=tmp_path)
    assert isinstance(select_backend(settings, torch.float32, CPU, [SHAPE]), TorchAttention)
    asked_for = load(["ATTENTION_BACKEND=cpu"], model_cache_dir=tmp_path)
    with pytest.raises(SettingsError, match=r"ATTENTION_BACKEND=cpu: no C\+\+ compiler"):
        select_backend(asked_for, torch.float32, CPU, [SHAPE])


def test_what_the_kernel_cannot_do_is_said(tmp_path: Path) -> None:
    with pytest.raises(NoLibraryError, match="float16"):
        CpuAttention(BLOCK, torch.float16, tmp_path)
    with pytest.raises(NoLibraryError, match="BLOCK_SIZE=24"):
        CpuAttention(24, torch.float32, tmp_path)
    with pytest.raises(NoLibraryError, match="head size 9"):
        library.load("attention", tmp_path, DK=9, DV=9)
