"""Which tiles a launch gets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import heuristics
from kernels.decode_plan import SPLIT
from kernels.heuristics import DecodeConfig, PrefillConfig, Shape
from kernels.paged_cache import PagedCache

SHAPES = [
    Shape(arch, head_dim, group, query_bytes, cache_bytes)
    for arch in ("sm_80", "sm_90", "sm_100", "gfx942", "sm_75")
    for head_dim in (16, 64, 128, 256)
    for group in (1, 3, 20)
    for query_bytes, cache_bytes in ((4, 4), (2, 2), (2, 1))
]


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of configurations, and a device that is an H200."""
    monkeypatch.setattr(heuristics, "CONFIGS", tmp_path)
    monkeypatch.setattr(heuristics, "arch", lambda _device: "sm_90")
    monkeypatch.setattr(heuristics, "num_multiprocessors", lambda _device: 132)
    heuristics._tuned.cache_clear()
    yield tmp_path
    heuristics._tuned.cache_clear()


def query_and_cache(num_tokens: int, group: int = 4) -> tuple[torch.Tensor, PagedCache]:
    pool = torch.zeros(1, 8, 16, 128, dtype=torch.bfloat16)
    query = torch.zeros(1, 8 * group, 128, dtype=torch.bfloat16)
    return query.expand(num_tokens, -1, -1), PagedCache(pool, pool)


def test_tiles_are_whole_parts_of_a_piece() -> None:
    for shape in SHAPES:
        assert SPLIT % heuristics.decode_rule(shape).tile == 0
        assert SPLIT % heuristics.prefill_rule(shape).tile == 0


@pytest.mark.usefixtures("tuned")
def test_few_rows_get_small_blocks_and_the_same_tiles() -> None:
    large = heuristics.prefill_config(*query_and_cache(8192))
    small = heuristics.prefill_config(*query_and_cache(64))
    assert (large.block_m, small.block_m) == (128, 64)
    assert large.tile == small.tile  # so that a result does not depend on the batch


@pytest.mark.usefixtures("tuned")
def test_a_block_holds_all_heads_of_a_group() -> None:
    assert heuristics.prefill_config(*query_and_cache(1, group=71)).block_m == 128


def test_what_was_tuned_goes_before_the_rules(tuned: Path) -> None:
    decode = {"tile": 32, "num_warps": 8, "num_stages": 2, "programs_per_multiprocessor": 1}
    prefill = {"block_m": 128, "tile": 128, "num_warps": 8, "num_stages": 2}
    entries = {"decode-d128-g4-q2-kv2": decode, "prefill-d128-g4-q2-kv2": prefill}
    (tuned / "sm_90.json").write_text(json.dumps(entries))
    assert heuristics.decode_config(*query_and_cache(1)) == DecodeConfig(**decode)
    assert heuristics.prefill_config(*query_and_cache(8192)) == PrefillConfig(**prefill)
    other = heuristics.decode_config(*query_and_cache(1, group=2))
    assert other == heuristics.decode_rule(Shape("sm_90", 128, 2, 2, 2))
