"""The scripts for a GPU machine do what they can without one: check the kernels, write configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_batches, gpu_checks, tune
from kernels import heuristics
from kernels.heuristics import DecodeConfig, PrefillConfig

CPU = torch.device("cpu")


SIZES = replace(gpu_batches.TINY, query_heads=1, dim=16, vocabulary=100)


def test_the_checks_pass_and_see_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_checks.check_attention(CPU, SIZES, (20, 3))
    wrong = gpu_checks.decode

    def off(batch: gpu_batches.Batch, **how: object) -> Callable[[], torch.Tensor]:
        return lambda: wrong(batch, **how)() + 0.1

    monkeypatch.setattr(gpu_checks, "decode", off)
    with pytest.raises(AssertionError, match="off by"):
        gpu_checks.check_attention(CPU, SIZES, (20, 3))


@pytest.mark.parametrize(
    ("kernel", "check"),
    [
        ("reshape_and_cache", lambda: gpu_checks.check_cache_writes(CPU, SIZES, 20)),
        ("copy_blocks", lambda: gpu_checks.check_copies(CPU, SIZES)),
        ("residual_rmsnorm", lambda: gpu_checks.check_rows(CPU, SIZES)),
        ("sample", lambda: gpu_checks.check_sampling(CPU, SIZES, 4)),
    ],
)
def test_every_check_sees_a_kernel_that_does_something_else(
    kernel: str, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check()
    real = getattr(gpu_checks, kernel)

    def off(first: torch.Tensor, *others: Any) -> Any:
        return real(first.roll(1, dims=0) if first.ndim else first, *others)

    monkeypatch.setattr(gpu_checks, kernel, off)
    with pytest.raises(AssertionError):
        check()


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
