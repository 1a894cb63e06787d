"""What launchers refuse, and what they do where no kernel can run."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels
from kernels import paged_cache, reference
from kernels.copy_blocks import copy_blocks
from kernels.decode_attention import attend_decodes
from kernels.decode_plan import plan_decodes
from kernels.draw import Draw
from kernels.head_norms import HeadNorms
from kernels.paged_cache import PagedCache
from kernels.prefill_attention import attend_ragged
from kernels.reshape_and_cache import reshape_and_cache
from kernels.residual_rmsnorm import residual_rmsnorm
from kernels.rotary_and_cache import rotary_and_cache
from kernels.sampling import sample
from kernels.silu_mul import silu_mul
from tests.unit.kernels.paged_batch import PagedBatch, make_batch

CPU = torch.device("cpu")


def decode(batch: PagedBatch, **options: Any) -> Tensor:
    plan = plan_decodes(batch.seq_lens.numpy(), CPU)
    return attend_decodes(batch.query, batch.cache, batch.block_tables, plan, scale=0.1, **options)


def prefill(batch: PagedBatch, **options: Any) -> Tensor:
    return attend_ragged(*batch.operands, scale=0.1, **options)


@pytest.mark.usefixtures("no_interpreter")
def test_off_the_gpu_attention_is_the_reference() -> None:
    batch = make_batch([1, 1, 1], [40, 17, 3])
    expected = reference.attend(*batch.operands, scale=0.1)
    assert torch.equal(decode(batch), expected)
    assert torch.equal(prefill(batch), expected)
    out = torch.full_like(expected, 7.0)
    prefill(batch, first_seq=2, out=out)
    assert torch.equal(out[2:], expected[2:])
    assert (out[:2] == 7.0).all()


@pytest.mark.usefixtures("no_interpreter")
def test_off_the_gpu_everything_else_is_the_reference() -> None:
    pool = torch.zeros(2, 1, 16, 64)
    cache = PagedCache(pool, pool.clone())
    heads, slots, cos_sin = torch.randn(3, 1, 64), torch.tensor([4, -1, 31]), torch.randn(40, 64)
    reshape_and_cache(heads, heads, cache, slots)
    assert torch.equal(cache.key[1, 0, 15], heads[2, 0])
    rotated = rotary_and_cache(heads, heads, heads, cache, slots.clamp(min=0), slots, cos_sin)
    assert torch.equal(cache.key[0, 0, 4], rotated[0, 0])
    hidden, residual = torch.randn(2, 3, 64)
    expected, total = reference.residual_rmsnorm(hidden, residual, hidden[0], 1e-5)
    assert torch.equal(residual_rmsnorm(hidden, residual, hidden[0], 1e-5), expected)
    assert torch.equal(residual, total)
    assert torch.equal(silu_mul(hidden), reference.silu_mul(hidden))
    copy_blocks(cache.key, cache.value, torch.tensor([[1, 0]]))
    assert torch.equal(cache.value[0], cache.key[1])
    ones = torch.ones(3)
    how = Draw(ones, ones.int(), ones, ones, torch.zeros(3, 2, dtype=torch.int32))
    assert torch.equal(sample(hidden, how)[0], hidden.argmax(-1))


BATCH = make_batch([1, 1], [40, 17])
POOL = torch.zeros(2, 1, 16, 64)
HEADS = torch.zeros(3, 1, 64)
CACHE = PagedCache(POOL, POOL)
SLOTS = torch.zeros(3, dtype=torch.int64)
ONES = torch.ones(2)
DRAW = Draw(ONES, ONES.int(), ONES, ONES, torch.zeros(2, 2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PagedCache(POOL, POOL.half()), "keys are torch.float32, but values are"),
        (lambda: PagedCache(POOL[:, :, :10], POOL[:, :, :10]), "blocks of 10 tokens"),
        (lambda: PagedCache(POOL[..., :20], POOL[..., :20]), "keys of 20 numbers"),
        (lambda: PagedCache(POOL.mT, POOL.mT), "the last should be 1"),
        (lambda: PagedCache(POOL.int(), POOL.int()), "key pool is torch.int32"),
        (lambda: PagedCache(POOL, POOL, ONES[:1]), "key scale: a float8 cache has one"),
        (lambda: PagedCache(*[POOL.to(torch.float8_e5m2)] * 2), "key scale: a float8 cache"),
        (lambda: decode(replace(BATCH, query=BATCH.query[:, :5])), "5 query heads cannot share 2"),
        (lambda: decode(replace(BATCH, query=BATCH.query.half())), "query is torch.float16, but"),
        (lambda: decode(replace(BATCH, query=BATCH.query[:1])), "block tables has the shape|query"),
        (lambda: decode(replace(BATCH, block_tables=BATCH.block_tables.long())), "block tables is"),
        (lambda: decode(BATCH, out=BATCH.query.half()), "out is torch.float16"),
        (lambda: decode(BATCH, sinks=torch.zeros(5)), "sinks has the shape"),
        (
            lambda: prefill(replace(BATCH, seq_lens=BATCH.seq_lens.long())),
            "seq_lens is torch.int64",
        ),
        (
            lambda: prefill(replace(BATCH, query_start_loc=BATCH.seq_lens)),
            "query_start_loc has the shape",
        ),
        (lambda: reshape_and_cache(HEADS.half(), HEADS, CACHE, SLOTS), "value is torch.float32"),
        (lambda: reshape_and_cache(HEADS[:2], HEADS, CACHE, SLOTS), "value has the shape"),
        (lambda: reshape_and_cache(HEADS, HEADS, CACHE, SLOTS.float()), "slot_mapping is"),
        (
            lambda: rotary_and_cache(HEADS, HEADS, HEADS, CACHE, SLOTS, SLOTS, POOL[0, 0, :, 1:]),
            "cos_sin has the shape",
        ),
        (
            lambda: rotary_and_cache(
                *(HEADS, HEADS, HEADS, CACHE, SLOTS, SLOTS, POOL[0, 0]),
                norms=HeadNorms(HEADS[0, 0], ONES, 1e-5),
            ),
            "key norm has the shape",
        ),
        (lambda: residual_rmsnorm(HEADS[:, 0], None, ONES, 1e-5), "weight has the shape"),
        (lambda: silu_mul(torch.zeros(2, 33)[:, :31]), "should start at multiples|not as many"),
        (lambda: copy_blocks(POOL, POOL[:, :, :8], SLOTS[:2][None]), "where other blocks are"),
        (lambda: copy_blocks(POOL.mT, POOL.mT, SLOTS[:2][None]), "not one stretch"),
        (lambda: sample(HEADS[:, 0], DRAW), "temperature has the shape"),
        (lambda: sample(ONES[:, None].int(), DRAW), "logits is torch.int32"),
    ],
)
def test_operands_that_do_not_fit_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_gpu_that_cannot_convert_a_float8_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_cache, "arch", lambda _device: "sm_80")
    pool, scale = POOL.to(torch.float8_e4m3fn), torch.ones(1)
    with pytest.raises(ValueError, match="float8_e5m2 is possible"):
        PagedCache(pool, pool, scale, scale)
    pool = POOL.to(torch.float8_e5m2)
    assert PagedCache(pool, pool, scale, scale).is_float8


def test_nothing_to_do_is_fine() -> None:
    starts = torch.zeros(1, dtype=torch.int32)
    batch = PagedBatch(BATCH.query[:0], BATCH.cache, BATCH.block_tables[:0], starts, starts[:0])
    assert decode(batch).shape == prefill(batch).shape == (0, 6, 64)
    reshape_and_cache(HEADS[:0], HEADS[:0], CACHE, SLOTS[:0])
    copy_blocks(POOL, POOL.clone(), torch.zeros(0, 2, dtype=torch.int64))
    assert len(silu_mul(torch.zeros(0, 64))) == 0
    assert len(residual_rmsnorm(torch.zeros(0, 64), None, torch.zeros(64), 1e-5)) == 0
    none = Draw(ONES[:0], ONES[:0].int(), ONES[:0], ONES[:0], torch.zeros(0, 2, dtype=torch.int32))
    assert len(sample(torch.zeros(0, 9), none)[0]) == 0


def test_the_package_imports_nothing() -> None:
    """A library of the same name exists, and transformers executes what it finds."""
    source = Path(kernels.__file__ or "").read_text()
    assert [type(node) for node in ast.parse(source).body] == [ast.Expr]  # the docstring


def test_plans_are_made_on_the_host() -> None:
    plan = plan_decodes(np.array([3, 4]), CPU)
    assert plan.seq_lens.tolist() == [3, 4]
    assert plan.seq_lens.dtype == plan.work_starts.dtype == torch.int32
