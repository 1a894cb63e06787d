"""How many blocks fit, and what happens when too few do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker import kv_cache
from gpu_worker.attention.base import KVShape
from gpu_worker.kv_cache import Room
from gpu_worker.request_states import Capacity
from wire.config import SettingsError, load

GIB = 1024**3
MUCH = 100 * GIB


def fit(budget: int, free: int = MUCH, max_model_len: int = 64, **settings: Any) -> Capacity:
    """Blocks of 1000 bytes and 16 tokens."""
    wanted = Capacity(0, 16, max_model_len, 8, 64, 100)
    return kv_cache.fit(load(**settings), wanted, 1000, Room(budget, free))


def test_a_block_has_keys_and_values_of_all_layers() -> None:
    shapes = [KVShape(3, 64, 64), KVShape(2, 12, 8)]
    assert kv_cache.bytes_per_block(shapes, 16, torch.bfloat16) == (3 * 128 + 2 * 20) * 16 * 2


def test_as_many_blocks_as_the_budget_holds() -> None:
    assert fit(budget=7999).num_blocks == 7


def test_the_number_of_blocks_can_be_set() -> None:
    assert fit(budget=7999, num_gpu_blocks=5).num_blocks == 5


def test_the_cpu_default_is_a_quarter_of_what_is_free_and_at_most_4_gib() -> None:
    assert kv_cache.cpu_budget(load(), 8 * GIB) == 2 * GIB
    assert kv_cache.cpu_budget(load(), 64 * GIB) == 4 * GIB
    assert kv_cache.cpu_budget(load(kv_cache_memory_bytes=123), 64 * GIB) == 123


@pytest.mark.parametrize(
    ("budget", "free", "settings", "name"),
    [
        (999, MUCH, {}, r"GPU_MEMORY_UTILIZATION=0\.9, KV_CACHE_MEMORY_BYTES not set: "),
        (-5, -5, {}, r"GPU_MEMORY_UTILIZATION=0\.9, KV_CACHE_MEMORY_BYTES not set: "),
        (5000, 4999, {"kv_cache_memory_bytes": 5000}, "KV_CACHE_MEMORY_BYTES=5000: "),
        (0, 4999, {"num_gpu_blocks": 5}, "NUM_GPU_BLOCKS=5: "),
    ],
)
def test_a_cache_larger_than_memory_is_refused_by_the_name_of_its_setting(
    budget: int, free: int, settings: dict[str, int], name: str
) -> None:
    """Exit code 2, as for every setting that cannot be used."""
    with pytest.raises(SettingsError, match=rf"^{name}.* 1000 bytes .* GiB is free"):
        fit(budget, free, **settings)


def test_a_cpu_pool_larger_than_main_memory_is_refused() -> None:
    kv_cache.check_cpu_pool(5, 1000, free=5000)
    with pytest.raises(SettingsError, match="NUM_CPU_BLOCKS=6: blocks of 1000 bytes"):
        kv_cache.check_cpu_pool(6, 1000, free=5999)


def test_the_longest_request_is_shortened_to_what_fits() -> None:
    assert fit(budget=3000, max_model_len=64).max_model_len == 48
    assert fit(budget=4000, max_model_len=64).max_model_len == 64


def test_a_containers_limit_counts_as_the_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_CGROUP", tmp_path)
    whole = kv_cache.free_memory()
    assert whole > 5000
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.max").write_text("8000\n")
    assert kv_cache.free_memory() == 5000
    (tmp_path / "memory.max").write_text("max\n")
    assert kv_cache.free_memory() > 5000
