"""The torch backend reads through block tables exactly what dense attention would read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata, KVShape, LayerAttention
from gpu_worker.attention.plan import Planner
from gpu_worker.attention.torch import TorchAttention

BLOCK = 16
GARBAGE = 2**40  # what a block table holds beyond its end: following it would crash
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sequence:
    """`cached` tokens are in the cache already; the step computes `queries` more."""

    cached: int
    queries: int

    @property
    def length(self) -> int:
        return self.cached + self.queries


MIXED = [
    Sequence(40, 1),
    Sequence(0, 1),
    Sequence(BLOCK - 1, 1),
    Sequence(BLOCK, 1),
    Sequence(0, BLOCK),
    Sequence(0, 2 * BLOCK + 1),
    Sequence(BLOCK, BLOCK),
    Sequence(37, 9),
    Sequence(2 * BLOCK, 1),
]


class Step:
    """A cache full of NaN, in which each sequence's cached tokens have been written."""

    def __init__(  # noqa: PLR0917 - a step is all of these
        self,
        sequences: list[Sequence],
        shape: KVShape,
        num_heads: int,
        dtype: torch.dtype = torch.float32,
        spare_blocks: int = 3,
        make_backend: Callable[[int, torch.dtype], Any] = lambda size, dtype: TorchAttention(
            size, dtype, CPU
        ),
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.sequences = sequences
        needed = [-(-s.length // BLOCK) for s in sequences]
        self.num_blocks = sum(needed) + spare_blocks
        order = torch.randperm(self.num_blocks, generator=generator)
        tables = torch.full((len(sequences), max(needed) + 1), GARBAGE)
        held = order.split([*needed, spare_blocks])[: len(needed)]
        for row, count, blocks in zip(tables, needed, held, strict=True):
            row[:count] = blocks
        self.tables = tables

        def random(heads: int, tokens: int, dim: int) -> Tensor:
            return torch.randn(heads, tokens, dim, generator=generator).to(dtype)

        self.keys = [random(shape.num_kv_heads, s.length, shape.key_dim) for s in sequences]
        self.values = [random(shape.num_kv_heads, s.length, shape.value_dim) for s in sequences]
        self.queries = [random(num_heads, s.queries, shape.key_dim) for s in sequences]
        self.backend = make_backend(BLOCK, dtype)
        self.backend.alloc_kv([shape], self.num_blocks)
        for pool in self.backend.cache(0):
            pool.fill_(torch.nan)
        self._write(0, [s.cached for s in sequences])

    def slots(self, sequence: int, start: int, end: int) -> Tensor:
        at = torch.arange(start, end)
        return self.tables[sequence, at // BLOCK] * BLOCK + at % BLOCK

    def _write(self, start: int, ends: list[int]) -> AttentionMetadata:
        starts = [0] * len(ends) if start == 0 else [s.cached for s in self.sequences]
        spans = list(zip(starts, ends, strict=True))
        metadata = AttentionMetadata(
            query_start_loc=np.cumsum([0, *(end - begin for begin, end in spans)]),
            seq_lens=np.array(ends),
            slot_mapping=torch.cat([self.slots(i, a, b) for i, (a, b) in enumerate(spans)]),
            block_tables=self.tables,
        )
        self.backend.begin_step(metadata)
        key = torch.cat([k[:, a:b] for k, (a, b) in zip(self.keys, spans, strict=True)], dim=1)
        value = torch.cat([v[:, a:b] for v, (a, b) in zip(self.values, spans, strict=True)], dim=1)
        self.backend.write(0, key, value)
        return metadata

    def write(self) -> AttentionMetadata:
        return self._write(1, [s.length for s in self.sequences])

    def run(self, how: LayerAttention) -> list[Tensor]:
        """Outputs (queries, HQ, DV) of each sequence."""
        self.write()
        out = self.backend.attend(0, torch.cat(self.queries, dim=1), how)
        return list(out.split([s.queries for s in self.sequences]))

    def dense(self, how: LayerAttention) -> list[Tensor]:
        return [
            dense(*tensors, how)
            for tensors in zip(self.queries, self.keys, self.values, strict=True)
        ]


def dense(query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
    """Textbook attention in float64."""
    group = query.shape[0] // key.shape[0]
    query, key, value = query.double(), key.double(), value.double()
    key, value = key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0)
    scores = query @ key.transpose(1, 2) * how.scale
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    key_at = torch.arange(key.shape[1])
    query_at = torch.arange(key.shape[1] - query.shape[1], key.shape[1]).unsqueeze(1)
    hidden = key_at > query_at
    if how.sliding_window is not None:
        hidden |= key_at <= query_at - how.sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)
    total = scores.exp().sum(-1, keepdim=True)
    if how.sinks is not None:
        total = total + how.sinks.double().exp().view(-1, 1, 1)
    return (scores.exp() / total @ value).transpose(0, 1)


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


SINKS = torch.linspace(-1.0, 2.0, 6)
VARIANTS = {
    "plain": LayerAttention(0.25),
    "window": LayerAttention(0.25, sliding_window=5),
    "window of a block": LayerAttention(0.25, sliding_window=BLOCK),
    "wide window": LayerAttention(0.25, sliding_window=33),
    "softcap": LayerAttention(0.25, softcap=1.5),
    "sinks": LayerAttention(0.25, sinks=SINKS),
    "all at once": LayerAttention(0.25, sliding_window=7, softcap=2.0, sinks=SINKS),
}


@pytest.mark.parametrize("how", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_paged_attention_equals_dense_attention(how: LayerAttention, num_kv_heads: int) -> None:
    step = Step(MIXED, KVShape(num_kv_heads, 8, 8), num_heads=6)
    assert_same(step.run(how), step.dense(how), 1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
@pytest.mark.parametrize("how", VARIANTS.values(), ids=VARIANTS.keys())
def test_short_floats_are_as_exact_as_they_can_be(
    how: LayerAttention, dtype: torch.dtype, tolerance: float
) -> None:
    step = Step(MIXED, KVShape(2, 8, 8), num_heads=6, dtype=dtype)
    assert_same(step.run(how), step.dense(how), tolerance)


def test_keys_and_values_may_differ_in_width() -> None:
    step = Step(MIXED, KVShape(2, 12, 8), num_heads=6)
    how = VARIANTS["plain"]
    assert_same(step.run(how), step.dense(how), 1e-5)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("num_sequences", [1, 3, 5, 7])
def test_no_batch_size_or_block_boundary_is_special(length: int, num_sequences: int) -> None:
    step = Step([Sequence(length - 1, 1)] * num_sequences, KVShape(2, 8, 8), num_heads=6)
    how = VARIANTS["plain"]
    assert_same(step.run(how), step.dense(how), 1e-5)


def test_first_and_last_block_of_the_pool_are_blocks_like_others() -> None:
    step = Step([Sequence(3, 1), Sequence(20, 5)], KVShape(2, 8, 8), num_heads=6, spare_blocks=0)
    held = {int(block) for block in step.tables.flatten() if block != GARBAGE}
    assert {0, step.num_blocks - 1} <= held
    how = VARIANTS["plain"]
    assert_same(step.run(how), step.dense(how), 1e-5)


def test_only_the_mapped_slots_change() -> None:
    step = Step(MIXED, KVShape(2, 8, 8), num_heads=6)
    before = [pool.clone() for pool in step.backend.cache(0)]
    metadata = step.write()
    step.backend.attend(0, torch.cat(step.queries, dim=1), VARIANTS["plain"])
    blocks, offsets = metadata.slot_mapping // BLOCK, metadata.slot_mapping % BLOCK
    for pool, old in zip(step.backend.cache(0), before, strict=True):
        changed = torch.zeros(pool.shape, dtype=torch.bool)
        changed[blocks, :, offsets] = True
        same = (pool == old) | (pool.isnan() & old.isnan())
        assert same[~changed].all()
        assert pool[changed].isfinite().all()


def test_a_request_full_of_nan_harms_only_itself() -> None:
    step = Step(MIXED, KVShape(2, 8, 8), num_heads=6)
    for sick in (0, 6):
        step.keys[sick].fill_(torch.nan)
        step.queries[sick].fill_(torch.nan)
    how = VARIANTS["plain"]
    found, expected = step.run(how), step.dense(how)
    for sick in (6, 0):
        assert found.pop(sick).isnan().any()
        expected.pop(sick)
    assert_same(found, expected, 1e-5)


def test_long_chunks_are_attended_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.attention.dense.TILE", 7)
    for name in ("plain", "wide window", "sinks"):
        step = Step(MIXED, KVShape(2, 8, 8), num_heads=6)
        assert_same(step.run(VARIANTS[name]), step.dense(VARIANTS[name]), 1e-5)


def test_very_different_lengths_are_not_padded_to_the_longest() -> None:
    lengths = [4000, 3000, 17, 90, 100, 1, 4001]
    step = Step([Sequence(n - 1, 1) for n in lengths], KVShape(2, 8, 8), num_heads=6)
    how = VARIANTS["plain"]
    assert_same(step.run(how), step.dense(how), 1e-5)
    planner = Planner(BLOCK, step.num_blocks, 300, torch.float32, CPU)
    plan = planner.plan(step.write(), None)
    padded = sum(group.blocks.numel() for group in plan.groups)
    assert padded <= 2 * sum(-(-n // BLOCK) for n in lengths)
    assert max(group.blocks.numel() for group in plan.groups) <= 300


def test_a_window_brings_only_the_blocks_together_that_it_can_see() -> None:
    step = Step([Sequence(4000, 1), Sequence(2000, 40)], KVShape(2, 8, 8), num_heads=6)
    how = LayerAttention(0.25, sliding_window=20)
    assert_same(step.run(how), step.dense(how), 1e-5)
    plan = Planner(BLOCK, step.num_blocks, 300, torch.float32, CPU).plan(step.write(), 20)
    assert plan.groups[0].blocks.shape[1] <= 3
    assert plan.stretches[0].blocks.shape[1] <= 5


def test_a_pool_of_more_than_two_billion_numbers_is_addressed_right() -> None:
    """Only the memory of a few blocks is ever touched."""
    shape, num_blocks = KVShape(8, 128, 8), 2**31 // (8 * 128 * BLOCK) + 2
    backend = TorchAttention(BLOCK, torch.bfloat16, CPU)
    backend.alloc_kv([shape], num_blocks)
    assert backend.cache(0)[0].numel() > 2**31
    last = torch.tensor([[num_blocks - 1]])
    metadata = AttentionMetadata(np.array([0, 1]), np.array([1]), last[0] * BLOCK, last)
    backend.begin_step(metadata)
    value = torch.arange(64.0).view(8, 1, 8).bfloat16()
    backend.write(0, torch.ones(8, 1, 128, dtype=torch.bfloat16), value)
    out = backend.attend(0, torch.ones(8, 1, 128, dtype=torch.bfloat16), VARIANTS["plain"])
    assert torch.equal(out, value.transpose(0, 1))
