"""Real tokenizers, small enough to make in a test: byte-level, and with byte tokens and Metaspace.

`write_model_folder` makes a folder that a gateway can serve; its weights are empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.content == 'refuse me' -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

BOS_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE

_TEXTS = (
    "hello world, how are you today? one two three four five six seven eight nine ten",
    "the quick brown fox jumps over the lazy dog. def main(): return 0",
    "naïve café 你好世界 नमस्ते 👍🏽 👩‍💻 🇩🇪",
)


def byte_level_tokenizer() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM2 have it: each character of a token is a byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def ascii_tokenizer() -> Tokenizer:
    """Byte-level, one printable character a token: id 0 is the space; and an end mark, id 95."""
    alphabet = ["Ġ", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def large_tokenizer() -> Tokenizer:
    """Byte-level with 50,000 tokens, as real models have; made of merges without any training."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinsrhdlucmfwypvbgkjqxz0123456789"
    pairs = [(a, b) for a in letters for b in letters]
    triples = [(a + b, c) for a, b in pairs for c in letters]
    tokens = [*alphabet, *(a + b for a, b in pairs), *(a + b for a, b in triples)]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[*pairs, *triples])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 and Mistral have it: `▁` for spaces, and a token for each byte."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab += ["▁", *"abcdefghijklmnopqrstuvwxyz.,!"]
    merges: list[tuple[str, str]] = []
    for word in ("▁hello", "▁world", "▁the", "▁fox"):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocab)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    """As T5 has it: `▁` for spaces and no byte tokens."""
    vocab = {"<unk>": 0, "▁": 1, "▁hello": 2, "▁world": 3, "lo": 4, "!": 5}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def write_model_folder(
    folder: Path,
    tokenizer: Tokenizer | None = None,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> Path:
    """Write a folder with a tokenizer, a configuration and weights that are none."""
    tokenizer = tokenizer or byte_level_tokenizer()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = special_tokens or {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False, **tokens}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    size = tokenizer.get_vocab_size()
    facts = {"vocab_size": size + 8, "max_position_embeddings": 256, **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(facts))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    header = b"{}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder
