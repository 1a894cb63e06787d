"""A GGUF file becomes a folder with the same weights, a chat template, and answers that end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

from gpu_worker.convert import convert, end_tokens, main
from tests.fakes import tiny_models

END_OF_TURN = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", END_OF_TURN]


def write_gguf(path: Path, model: Any, eos: int = 2, template: str | None = TEMPLATE) -> Path:
    """A llama as llama.cpp writes it: other names, and rotary dimensions in another order."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens + [f"<|{i}|>" for i in range(config.vocab_size - len(tokens))])
    writer.add_token_types([3] * 3 + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    if template is not None:
        writer.add_chat_template(template)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(_gguf_name(name), _as_llama_cpp(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    pairs = [
        ("model.embed_tokens", "token_embd"),
        ("model.layers", "blk"),
        ("model.norm", "output_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ]
    for ours, theirs in pairs:
        name = name.replace(ours, theirs)
    return name


def _as_llama_cpp(name: str, tensor: torch.Tensor, config: Any) -> np.ndarray:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num_heads in heads.items():
        if part in name:
            halves = tensor.reshape(num_heads, 2, -1, tensor.shape[1])
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensor.float().numpy()


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = tiny_models.llama()
    config.vocab_size, config.tie_word_embeddings = 264, True
    return transformers.AutoModelForCausalLM.from_config(config)


def test_the_folder_holds_the_files_own_weights_and_text(model: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", model)
    convert(source, tmp_path / "folder")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype="auto")
    assert found.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor.bfloat16()), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "héllo 12"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhéllo 12<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.model_max_length == tiny_models.MAX_LEN
    assert found.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(END_OF_TURN)


def test_what_ends_a_turn_ends_an_answer_too(model: Any, tmp_path: Path) -> None:
    """Some files name only the token that ends a document."""
    source = write_gguf(tmp_path / "tiny.gguf", model, eos=0)
    convert(source, tmp_path / "folder")
    found = transformers.GenerationConfig.from_pretrained(tmp_path / "folder")
    assert found.eos_token_id == [0, 2]


def test_a_file_without_a_template_still_ends(model: Any, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", model, template=None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=source.name)
    assert end_tokens(tokenizer) == [2]


def test_a_broken_file_leaves_no_folder_and_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    assert main([str(tmp_path / "broken.gguf"), str(tmp_path / "folder")]) == 1
    assert not (tmp_path / "folder").exists()
    last = capsys.readouterr().err.splitlines()[-1]
    assert "Error: " in last


def test_wrong_arguments_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "usage" in capsys.readouterr().err
