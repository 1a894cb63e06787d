"""The scripts for a GPU machine do what they can without one: check the kernels, write configs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import gpu_kernels, tune
from kernels import heuristics
from kernels.heuristics import DecodeConfig, PrefillConfig

CPU = torch.device("cpu")


def test_the_benchmark_compares_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUERY_HEADS", "KV_HEADS"):
        monkeypatch.setattr(gpu_kernels, name, 1)
    monkeypatch.setattr(gpu_kernels, "DIM", 16)
    gpu_kernels.check(CPU, lengths=(20, 3))
    wrong = gpu_kernels.decode

    def off(batch: gpu_kernels.Batch, **how: object) -> Callable[[], torch.Tensor]:
        return lambda: wrong(batch, **how)() + 0.1

    monkeypatch.setattr(gpu_kernels, "decode", off)
    with pytest.raises(AssertionError, match="off by"):
        gpu_kernels.check(CPU, lengths=(20, 3))


def test_what_the_tuner_writes_is_what_a_launch_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, prefill = DecodeConfig(32, 4, 2, 2), PrefillConfig(64, 32, 4, 2)
    monkeypatch.setattr(tune, "KV_HEADS", 1)
    monkeypatch.setattr(tune, "DECODE", [DecodeConfig(64), decode])
    monkeypatch.setattr(tune, "PREFILL", [prefill, PrefillConfig(128, 64, 8, 3)])
    times = iter([2.0, 1.0, 3.0, 4.0])

    def measure(run: Callable[[], torch.Tensor]) -> float:
        assert run().isfinite().all()
        return next(times)

    monkeypatch.setattr(heuristics, "CONFIGS", tmp_path)
    tune.write(
        tune.tune(16, 2, CPU, measure=measure, num_seqs=2, length=32), tmp_path / "sm_90.json"
    )
    tune.write({"another": {"tile": 1}}, tmp_path / "sm_90.json")
    monkeypatch.setattr(heuristics, "arch", lambda _device: "sm_90")
    heuristics._tuned.cache_clear()
    pool = torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16)
    operands = torch.zeros(1, 2, 16, dtype=torch.bfloat16), heuristics.PagedCache(pool, pool)
    assert heuristics.decode_config(*operands) == decode
    assert heuristics.prefill_config(*operands) == prefill
    heuristics._tuned.cache_clear()
