"""Decode attention against the reference, and what must never depend on the rest of a batch."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.decode_attention import attend_decodes
from kernels.decode_plan import plan_decodes, repeatable_plan, work_starts
from kernels.heuristics import DecodeConfig
from tests.unit.kernels.paged_batch import PagedBatch, assert_close, make_batch

LENGTHS = [130, 17, 64, 65, 1, 97]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GROUPS, DIMS = [1, 3, 4, 7], [64, 80, 96, 128]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 40},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "pieces": {"split": 32},
    "pieces, window": {"split": 32, "window": 40},
    "everything": {"split": 32, "window": 70, "softcap": 5.0, "sinks": True},
}
SCALE = 0.125


def decodes(**options: Any) -> PagedBatch:
    return make_batch([1] * len(LENGTHS), LENGTHS, **options)


def attend(batch: PagedBatch, *, window: int = 0, split: int = 512, **options: Any) -> Tensor:
    options.setdefault("config", DecodeConfig(tile=32, programs_per_multiprocessor=5))
    lens = batch.seq_lens.numpy()
    plan = plan_decodes(lens, batch.query.device, window, split=split, max_items=4)
    return attend_decodes(
        batch.query, batch.cache, batch.block_tables, plan, scale=SCALE, **options
    )


@pytest.mark.parametrize(
    ("dtype", "variant", "group", "dim"),
    [
        pytest.param(dtype, variant, GROUPS[i % 4], DIMS[(i + i // 4) % 4], id=f"{variant}-{i}")
        for i, (dtype, variant) in enumerate(product(DTYPES, VARIANTS))
    ],
)
def test_decode_is_the_reference(dtype: torch.dtype, variant: str, group: int, dim: int) -> None:
    batch = decodes(dtype=dtype, group=group, num_kv_heads=1, key_dim=dim)
    how = dict(VARIANTS[variant])
    if "sinks" in how:
        how["sinks"] = torch.randn(group)
    actual = attend(batch, **how)
    how.pop("split", None)
    assert_close(actual, reference.attend(*batch.operands, scale=SCALE, **how))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"group": 1, "num_kv_heads": 4}, id="MHA"),
        pytest.param({"group": 20, "num_kv_heads": 1}, id="MQA, more heads than 16 rows"),
        pytest.param({"key_dim": 256}, id="largest head"),
        pytest.param({"key_dim": 96, "value_dim": 64}, id="narrow values"),
        pytest.param({"block_size": 64}, id="blocks of 64"),
        pytest.param({"block_size": 128}, id="blocks of 128"),
    ],
)
def test_decode_takes_every_shape(options: dict[str, int]) -> None:
    batch = decodes(**options)
    expected = reference.attend(*batch.operands, scale=SCALE)
    assert_close(attend(batch, split=128, config=DecodeConfig(tile=64)), expected)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_decode_reads_a_float8_cache(cache_dtype: torch.dtype) -> None:
    batch = decodes(dtype=torch.bfloat16, cache_dtype=cache_dtype)
    expected = reference.attend(*batch.operands, scale=SCALE)
    actual = attend(batch, split=64)
    torch.testing.assert_close(actual.float(), expected.float(), atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("window", [0, 40])
def test_decode_is_the_same_in_any_batch_bit_by_bit(window: int) -> None:
    batch = decodes(dtype=torch.bfloat16)
    together = attend(batch, split=32, window=window)
    for seq in range(len(LENGTHS)):
        alone = attend(
            batch.alone(seq),
            split=32,
            window=window,
            config=DecodeConfig(tile=32, programs_per_multiprocessor=1),
        )
        assert torch.equal(alone[0], together[seq])


@pytest.mark.parametrize("largest", [0, 20])
def test_more_pieces_than_are_put_together_at_once(largest: int) -> None:
    batch = make_batch([1, 1], [330, 20], num_kv_heads=1)
    batch.cache.key[batch.block_tables[0, largest].long()] *= 4  # where the largest scores are
    actual = attend(batch, split=16, config=DecodeConfig(tile=16))  # 21 pieces and 2
    assert_close(actual, reference.attend(*batch.operands, scale=SCALE))


def test_padding_rows_become_zeros_and_touch_nobody() -> None:
    batch = make_batch([1, 1, 1], [17, 0, 33])
    actual = attend(batch, split=16)
    assert_close(actual, reference.attend(*batch.operands, scale=SCALE))
    assert not actual[1].any()


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_decode_at_the_edges_of_a_block(length: int) -> None:
    batch = make_batch([1], [length])
    assert_close(attend(batch), reference.attend(*batch.operands, scale=SCALE))


def test_nan_of_one_sequence_stays_its_own() -> None:
    batch = decodes()
    clean = attend(batch, split=32)
    batch.cache.value[batch.block_tables[2, 0].long(), :, 3] = torch.nan
    sick = attend(batch, split=32)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(sick[others], clean[others])
    assert sick[2].isnan().all()


@pytest.mark.parametrize("window", [0, 700])
def test_a_launch_that_is_repeated_follows_lengths_that_are_written_anew(window: int) -> None:
    """As a CUDA graph does: the same launch, the same tensors, other numbers in them."""
    batch = make_batch([1, 1, 1, 1], [600, 17, 1030, 33], num_kv_heads=1)
    seq_lens, starts = torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    plan = repeatable_plan(seq_lens, starts, window, max_items=9)
    config = DecodeConfig(tile=64)
    for lens in ([600, 17, 1030, 33], [1, 17, 0, 0], [0, 0, 1030, 0]):
        seq_lens.copy_(torch.tensor(lens))
        starts.copy_(torch.from_numpy(work_starts(np.array(lens), window)))
        operands = (batch.query, batch.cache, batch.block_tables)
        actual = attend_decodes(*operands, plan, scale=SCALE, config=config)
        expected = reference.attend(
            *operands, batch.query_start_loc, seq_lens, scale=SCALE, window=window
        )
        assert_close(actual, expected)
        assert not actual[torch.tensor(lens) == 0].any()


def test_plan_covers_every_visible_token_once() -> None:
    lens, window, split = np.array([0, 1, 511, 512, 513, 5000]), 700, 512
    plan = plan_decodes(lens, torch.device("cpu"), window, split=split)
    starts = plan.work_starts.tolist()
    for seq, length in enumerate(lens.tolist()):
        first_visible = max(length - window, 0) // split
        assert starts[seq + 1] - starts[seq] == -(-length // split) - first_visible


def test_plan_bounds_what_is_in_flight() -> None:
    lens = np.array([100, 5000, 10, 10, 2000, 0])
    plan = plan_decodes(lens, torch.device("cpu"), split=100, max_items=8)
    sequences = [(launch.first_seq, launch.num_seqs) for launch in plan.launches]
    assert sequences == [(0, 1), (1, 1), (2, 2), (4, 1), (5, 1)]
    assert [launch.max_items for launch in plan.launches] == [1, 50, 2, 20, 0]
