"""The Triton backend reads through block tables exactly what dense attention would read."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpu_worker.attention import selector
from gpu_worker.attention import triton as triton_backend
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
from wire.config import SettingsError, load

SHAPE = KVShape(2, 16, 8)
WIDE = KVShape(2, 32, 16)  # whose rows are 16 bytes in one byte a number too
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


def test_a_machine_without_a_compiler_takes_plain_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Triton says it at the first launch; what `auto` does then, and what asking for it does."""

    def refuse(*_: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setenv("TRITON_CACHE_DIR", "/nowhere")  # choosing sets it, if nobody has
    monkeypatch.setattr(triton_backend, "reshape_and_cache", refuse)
    gpu = SimpleNamespace(type="cuda")  # as far as choosing goes
    make = TritonAttention
    monkeypatch.setattr(
        triton_backend,
        "TritonAttention",
        lambda size, dtype, _, **how: make(size, dtype, CPU, **how),
    )
    choose = partial(selector.select_backend, dtype=torch.float32, device=gpu, shapes=[WIDE])
    monkeypatch.setattr(selector, "TorchAttention", lambda *_: "plain torch")
    assert choose(load()) == "plain torch"
    assert "Failed to find C compiler" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="ATTENTION_BACKEND=triton: no kernel can be compiled"):
        choose(load(attention_backend="triton"))
    with pytest.raises(SettingsError, match=r"KV_CACHE_DTYPE=fp8: only the Triton.*compiled"):
        choose(load(kv_cache_dtype="fp8"))


def test_a_cache_of_one_byte_a_number_is_read_as_it_was_rounded() -> None:
    """Within what eight bits can hold: three bits behind the first."""
    backend = partial(TritonAttention, is_float8=True)
    step = Step(
        MIXED,
        WIDE,
        num_heads=6,
        dtype=torch.bfloat16,
        make_backend=lambda size, dtype: backend(size, dtype, CPU),
    )
    how = LayerAttention(0.25)
    assert step.backend.cache(0)[0].dtype == torch.float8_e4m3fn
    assert_same(step.run(how), step.dense(how), 0.15)


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
def test_a_cpu_has_no_such_cache(backend: str, tmp_path: Path) -> None:
    settings = load(kv_cache_dtype="fp8", attention_backend=backend, model_cache_dir=tmp_path)
    with pytest.raises(SettingsError, match=r"^KV_CACHE_DTYPE=fp8: .*`auto` works here"):
        selector.select_backend(settings, torch.float32, CPU, [SHAPE])
