"""Prefill attention against the reference, and what must not depend on how a prompt is cut."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.heuristics import PrefillConfig
from kernels.prefill_attention import attend_ragged
from tests.unit.kernels.paged_batch import PagedBatch, assert_close, make_batch

QUERY_LENS, SEQ_LENS = [1, 1, 33, 5, 1], [130, 17, 33, 70, 1]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GROUPS, DIMS = [1, 3, 4, 7], [64, 80, 96, 128]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "everything": {"window": 45, "softcap": 5.0, "sinks": True},
}
SCALE = 0.125
SMALL = PrefillConfig(block_m=16, tile=32, num_warps=4, num_stages=2)
LARGE = PrefillConfig(block_m=64, tile=64, num_warps=4, num_stages=3)


def attend(batch: PagedBatch, config: PrefillConfig = SMALL, **options: Any) -> Tensor:
    return attend_ragged(*batch.operands, scale=SCALE, config=config, **options)


@pytest.mark.parametrize(
    ("dtype", "variant", "group", "dim"),
    [
        pytest.param(dtype, variant, GROUPS[i % 4], DIMS[(i + i // 4) % 4], id=f"{variant}-{i}")
        for i, (dtype, variant) in enumerate(product(DTYPES, VARIANTS))
    ],
)
def test_prefill_is_the_reference(dtype: torch.dtype, variant: str, group: int, dim: int) -> None:
    batch = make_batch(QUERY_LENS, SEQ_LENS, dtype=dtype, group=group, num_kv_heads=1, key_dim=dim)
    how = dict(VARIANTS[variant])
    if "sinks" in how:
        how["sinks"] = torch.randn(group)
    assert_close(attend(batch, **how), reference.attend(*batch.operands, scale=SCALE, **how))


@pytest.mark.parametrize("how", [{}, {"window": 50}], ids=["plain", "window"])
@pytest.mark.parametrize("block_m", [64, 128])
def test_prefill_with_the_blocks_of_a_gpu(block_m: int, how: dict[str, int]) -> None:
    batch = make_batch([70, 1, 40], [200, 17, 40], dtype=torch.bfloat16)
    actual = attend(batch, PrefillConfig(block_m, 64, 4, 3), **how)
    assert_close(actual, reference.attend(*batch.operands, scale=SCALE, **how))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"group": 1, "num_kv_heads": 4}, id="MHA"),
        pytest.param({"group": 20, "num_kv_heads": 1}, id="MQA"),
        pytest.param({"key_dim": 256}, id="largest head"),
        pytest.param({"key_dim": 96, "value_dim": 64}, id="narrow values"),
        pytest.param({"block_size": 64}, id="blocks of 64"),
        pytest.param({"block_size": 128}, id="blocks of 128"),
    ],
)
def test_prefill_takes_every_shape(options: dict[str, int]) -> None:
    batch = make_batch(QUERY_LENS, SEQ_LENS, **options)
    assert_close(attend(batch, LARGE), reference.attend(*batch.operands, scale=SCALE))


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_prefill_reads_a_float8_cache(cache_dtype: torch.dtype) -> None:
    batch = make_batch(QUERY_LENS, SEQ_LENS, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    expected = reference.attend(*batch.operands, scale=SCALE)
    actual = attend(batch, LARGE)
    torch.testing.assert_close(actual.float(), expected.float(), atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("how", [{}, {"window": 37}], ids=["plain", "window"])
@pytest.mark.parametrize("cuts", [[90], [16, 74], [33, 1, 56]], ids=str)
def test_prefill_is_the_same_however_a_prompt_is_cut_bit_by_bit(
    cuts: list[int], how: dict[str, int]
) -> None:
    whole = make_batch([120], [120], dtype=torch.bfloat16)
    expected = attend(whole, LARGE, **how)
    done = 120 - sum(cuts)
    parts = [expected[:done]]  # as if it came from a prefix cache
    for size in cuts:
        chunk = PagedBatch(
            whole.query[done : done + size],
            whole.cache,
            whole.block_tables,
            torch.tensor([0, size], dtype=torch.int32),
            torch.tensor([done + size], dtype=torch.int32),
        )
        parts.append(attend(chunk, LARGE, **how))
        done += size
    assert torch.equal(torch.cat(parts), expected)


def test_sequences_before_the_first_are_left_alone() -> None:
    batch = make_batch(QUERY_LENS, SEQ_LENS)
    out = torch.full_like(batch.query, 7.0)
    attend(batch, first_seq=2, out=out)
    assert (out[:2] == 7.0).all()
    assert_close(out[2:], reference.attend(*batch.operands, scale=SCALE)[2:])


def test_queries_may_lie_head_by_head() -> None:
    batch = make_batch(QUERY_LENS, SEQ_LENS)
    expected = attend(batch)
    by_head = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    tables, starts, lens = batch.operands[2:]
    actual = attend_ragged(by_head, batch.cache, tables, starts, lens, scale=SCALE, config=SMALL)
    assert torch.equal(actual, expected)


def test_tokens_beyond_the_last_sequence_are_left_alone() -> None:
    batch = make_batch([5, 3], [21, 3])
    padded = torch.cat((batch.query, torch.full_like(batch.query[:4], torch.nan)))
    out = torch.full_like(padded, 7.0)
    attend_ragged(padded, *batch.operands[1:], scale=SCALE, config=SMALL, out=out)
    assert (out[8:] == 7.0).all()
    assert_close(out[:8], reference.attend(*batch.operands, scale=SCALE))
