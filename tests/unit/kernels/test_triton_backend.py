"""The Triton backend reads through block tables exactly what dense attention would read."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gpu_worker.attention.base import KVShape, LayerAttention
from gpu_worker.attention.triton import TritonAttention
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

SHAPE = KVShape(2, 16, 8)
make_step = partial(Step, make_backend=lambda size, dtype: TritonAttention(size, dtype, CPU))


@pytest.mark.parametrize("name", ["plain", "all at once"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_a_mixed_step_equals_dense_attention(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    how = VARIANTS[name]
    step = make_step(MIXED, SHAPE, num_heads=6, dtype=dtype)
    assert_same(step.run(how), step.dense(how), tolerance)


@pytest.mark.parametrize(
    "sequences",
    [[Sequence(40, 1), Sequence(0, 1)], [Sequence(0, 20)], [Sequence(5, 3), Sequence(9, 1)]],
    ids=["decodes only", "prefill only", "a decode behind a prefill"],
)
def test_each_kernel_gets_its_sequences(sequences: list[Sequence]) -> None:
    step = make_step(sequences, SHAPE, num_heads=6)
    how = LayerAttention(0.25)
    assert_same(step.run(how), step.dense(how), 1e-5)


def test_what_the_kernels_do_not_know_is_said_before_a_cache_is_made() -> None:
    with pytest.raises(NoLibraryError, match="keys of 12 numbers"):
        TritonAttention(BLOCK, torch.float32, CPU).prepare([SHAPE, KVShape(2, 12, 8)])
