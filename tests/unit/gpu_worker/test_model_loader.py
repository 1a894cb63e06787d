"""Which models are served, on what, in which dtype, and how long a request may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from gpu_worker import model_loader
from gpu_worker.attention.base import KVShape
from gpu_worker.model_loader import load_model, pick_device, pick_dtype, pick_max_model_len
from tests.fakes import tiny_models
from wire.config import SettingsError, load
from wire.service import StartupError

CPU = torch.device("cpu")


def test_kv_shapes_and_vocabulary_are_what_the_model_really_uses(
    tiny_folder: Callable[[str], Path],
) -> None:
    model = load_model(load(device="cpu", dtype="float32"), tiny_folder("llama"))
    assert model.kv_shapes == [KVShape(2, 16, 16)] * 2
    assert (model.vocab_size, model.max_model_len) == (tiny_models.VOCAB, tiny_models.MAX_LEN)


def test_keys_may_be_wider_than_values(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        vocab_size=64,
    )
    folder = tiny_models.save(config, tmp_path)
    model = load_model(load(device="cpu", dtype="float32"), folder)
    assert model.kv_shapes == [KVShape(4, 12, 8)] * 2


# ---------------------------------------------------------------- refusals


def refusal(config: object, tmp_path: Path) -> str:
    folder = tiny_models.save(config, tmp_path)
    with pytest.raises(StartupError) as refused:
        load_model(load(device="cpu", max_model_len=64), folder)
    return str(refused.value)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    config.save_pretrained(tmp_path)
    with pytest.raises(StartupError, match="encoder-decoder"):
        load_model(load(device="cpu"), tmp_path)


def test_a_model_with_attention_of_its_own_is_refused(tmp_path: Path) -> None:
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)
    assert "0 of 2 layers attend" in refusal(config, tmp_path)


def test_a_model_that_keeps_other_state_is_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        hidden_size=16, num_hidden_layers=1, vocab_size=64, state_size=4
    )
    assert "0 of 1 layers attend" in refusal(config, tmp_path)


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    config = tiny_models.gemma3()
    config.use_bidirectional_attention = True
    assert "later tokens" in refusal(config, tmp_path)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonsense"}))
    with pytest.raises(StartupError, match="no configuration"):
        load_model(load(device="cpu"), tmp_path)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    tiny_models.llama().save_pretrained(tmp_path)
    with pytest.raises(StartupError, match="cannot be served"):
        load_model(load(device="cpu"), tmp_path)


# ---------------------------------------------------------------- dtype, device, length


def config_of(checkpoint: torch.dtype | None) -> SimpleNamespace:
    return SimpleNamespace(dtype=checkpoint, architectures=["Other"])


@pytest.mark.parametrize(
    ("flags", "checkpoint", "chosen"),
    [
        ({"avx512_bf16"}, torch.bfloat16, torch.bfloat16),
        ({"amx_bf16", "fma"}, torch.bfloat16, torch.bfloat16),
        ({"avx512f", "fma"}, torch.bfloat16, torch.float32),
        ({"avx512_bf16"}, torch.float16, torch.float32),
        ({"avx512_bf16"}, torch.float32, torch.float32),
        ({"avx512_bf16"}, None, torch.float32),
    ],
)
def test_auto_takes_the_checkpoints_dtype_where_the_processor_is_fast_at_it(
    flags: set[str],
    checkpoint: torch.dtype | None,
    chosen: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_loader, "processor_features", lambda: flags)
    assert pick_dtype(load(), config_of(checkpoint), CPU) == chosen
    assert pick_dtype(load(dtype="float16"), config_of(checkpoint), CPU) == torch.float16


@pytest.mark.parametrize(
    ("flags", "checkpoint", "chosen"),
    [
        ({"avx2", "fma"}, torch.bfloat16, torch.bfloat16),
        ({"avx2", "fma", "avx512f"}, torch.bfloat16, torch.bfloat16),
        ({"avx2", "fma"}, torch.float16, torch.float32),
        ({"sse4_2"}, torch.bfloat16, torch.float32),
        (set[str](), torch.bfloat16, torch.float32),
    ],
)
def test_auto_counts_on_our_own_decoder(
    flags: set[str],
    checkpoint: torch.dtype,
    chosen: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_loader, "processor_features", lambda: flags)
    config = tiny_models.llama()
    config.dtype, config.architectures = checkpoint, ["LlamaForCausalLM"]
    assert pick_dtype(load(), config, CPU) == chosen
    config.quantization_config = {"quant_method": "bitnet"}  # which it does not know
    assert pick_dtype(load(), config, CPU) == torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_a_bad_setting(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(SettingsError, match="DEVICE=cuda"):
        load_model(load(device="cuda"), tiny_folder("llama"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"quantization": "int8"}, "QUANTIZATION=int8: not on a GPU; `none` works here"),
        ({"batch_invariant": True}, "BATCH_INVARIANT=1: not on a GPU.*; 0 works here"),
    ],
)
def test_what_only_the_cpu_does_is_a_bad_setting_on_a_gpu(
    settings: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", "cuda"):
        with pytest.raises(SettingsError, match=sentence):
            pick_device(load(device=device, **settings))
    assert pick_device(load(device="cpu", **settings)) == CPU
    assert pick_device(load(device="auto")) == torch.device("cuda")


def test_weights_that_are_no_numbers_are_told_of_at_start(
    tiny_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One tensor: whoever meets it fails alone. Most of them: nobody could be served."""
    model = tiny_models.reference(tiny_folder("llama"))
    model.model.embed_tokens.weight.data[9, 3] = torch.nan
    model.save_pretrained(tmp_path / "one")
    load_model(load(device="cpu"), tmp_path / "one")
    assert "weights_not_finite" in (told := capsys.readouterr().out)
    assert "model.embed_tokens.weight" in told
    for weight in model.parameters():
        weight.data.view(-1)[0] = torch.inf
    model.save_pretrained(tmp_path / "all")
    with pytest.raises(StartupError, match="all: its weights are not finite, in 2"):
        load_model(load(device="cpu"), tmp_path / "all")


def test_a_dtype_that_the_gpu_lacks_is_a_bad_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(SettingsError, match=r"DTYPE=bfloat16: this GPU has none; float16"):
        pick_dtype(load(dtype="bfloat16"), config_of(torch.bfloat16), gpu)
    assert pick_dtype(load(), config_of(torch.bfloat16), gpu) == torch.float32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert pick_dtype(load(dtype="bfloat16"), config_of(torch.float32), gpu) == torch.bfloat16


def test_requests_may_be_shorter_but_not_longer_than_the_model_was_made_for() -> None:
    config = tiny_models.llama()
    assert pick_max_model_len(load(max_model_len=100), config) == 100
    with pytest.raises(SettingsError, match="at most 512"):
        pick_max_model_len(load(max_model_len=513), config)


def test_positions_that_depend_on_the_batch_are_never_reached() -> None:
    """Dynamic rotary embeddings change for all when one request of the batch grows long."""
    config = transformers.LlamaConfig(
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    )
    assert pick_max_model_len(load(), config) == 1024
