"""Tiny models with random weights, made in the test: real architectures, no download.

Weights are drawn wide enough that every token of the context changes the logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 97
MAX_LEN = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama() -> Any:
    return transformers.LlamaConfig(**_SIZES, num_hidden_layers=2)


def mistral() -> Any:
    return transformers.MistralConfig(**_SIZES, num_hidden_layers=2, sliding_window=20)


def qwen2() -> Any:
    return transformers.Qwen2Config(**_SIZES, num_hidden_layers=2)


def qwen2_windows() -> Any:
    """A layer that sees everything, and one with a window."""
    windows = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    return transformers.Qwen2Config(**_SIZES, **windows, num_hidden_layers=2)


def qwen3_moe() -> Any:
    return transformers.Qwen3MoeConfig(
        **_SIZES,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )


def mixtral() -> Any:
    return transformers.MixtralConfig(
        **_SIZES, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2
    )


def gemma2() -> Any:
    """Scores with a soft cap; logits as well."""
    return transformers.Gemma2Config(
        **_SIZES, num_hidden_layers=2, sliding_window=20, query_pre_attn_scalar=16
    )


def phi3() -> Any:
    """One matrix for queries, keys and values."""
    return transformers.Phi3Config(
        **{**_SIZES, "num_attention_heads": 3, "num_key_value_heads": 1}, num_hidden_layers=2
    )


def olmo2() -> Any:
    """Norms behind attention and MLP."""
    return transformers.Olmo2Config(
        **{**_SIZES, "num_attention_heads": 3, "num_key_value_heads": 1}, num_hidden_layers=2
    )


def gpt_neox() -> Any:
    """Attention and MLP side by side, rotary on a quarter of each head."""
    return transformers.GPTNeoXConfig(**{**_SIZES, "num_attention_heads": 3}, num_hidden_layers=2)


def qwen3() -> Any:
    return transformers.Qwen3Config(**_SIZES, num_hidden_layers=2)


def gemma3() -> Any:
    """Sliding and full attention by turns."""
    return transformers.Gemma3TextConfig(
        **_SIZES,
        num_hidden_layers=4,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=16,
    )


def gpt2() -> Any:
    """Positions by a table, no grouped heads."""
    return transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=MAX_LEN,
        n_embd=48,
        n_layer=2,
        n_head=6,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )


def gpt_oss() -> Any:
    """A mixture of experts, with attention sinks."""
    sizes = {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    layer_types = ["sliding_attention", "full_attention"]
    return transformers.GptOssConfig(
        **sizes, num_hidden_layers=2, sliding_window=20, layer_types=layer_types
    )


ARCHITECTURES = {
    f.__name__: f
    for f in (
        llama,
        mistral,
        qwen2,
        qwen2_windows,
        qwen3,
        qwen3_moe,
        mixtral,
        gemma2,
        gemma3,
        phi3,
        olmo2,
        gpt_neox,
        gpt2,
        gpt_oss,
    )
}


def save(config: Any, folder: Path, seed: int = 0, *, dtype: torch.dtype = torch.float32) -> Path:
    """Make the model and write its folder."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    return folder


def make_stream_uneven(module: Any) -> None:
    """Give a Llama a number that is large in every hidden state and counts for little.

    Real models have a few. What a layer adds there is lost to rounding where a stream is bfloat16.
    """
    module.model.embed_tokens.weight[:, 7] = 3000.0
    for layer in module.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight *= 400.0  # what the large one leaves of the others is of their size again
            norm.weight[7] = 0.0


def reference(folder: Path) -> Any:
    """The same model with transformers' own attention, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def last_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits (VOCAB,) after these tokens, from one full forward."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0, -1]


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The model's own greedy continuation; goes on after an end-of-sequence token."""
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
        )
    return [int(token) for token in output[0, len(prompt) :]]
