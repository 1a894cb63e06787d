"""What a model folder says of its model: size of the vocabulary, longest context, ends, defaults.

Reads `config.json` and `generation_config.json`, and nothing else. No tokenizer, no weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger()

_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length")
_NOT_APPLIED = {"min_new_tokens": 0}


class ModelFolderError(Exception):
    """A model folder that cannot be served; the text says why."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say; the model's authors may have set it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the gateway must know of a model to judge requests."""

    vocab_size: int  # width of the logits; the tokenizer may have fewer tokens
    max_model_len: int  # longest prompt plus output, in tokens
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)


def read_facts(
    folder: Path, max_model_len: int | None = None, tokenizer_eos_id: int | None = None
) -> ModelFacts:
    """Read a model folder; `max_model_len` may shorten what the model can do.

    Raises:
        ModelFolderError: a file is missing, no JSON, or lacks what is needed.

    """
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config")
    text = {**config, **(text_config if isinstance(text_config, dict) else {})}
    generation: Mapping[str, Any] = {}
    if (folder / "generation_config.json").exists():
        generation = _read_json(folder / "generation_config.json")
    eos = generation.get("eos_token_id", text.get("eos_token_id"))
    ends = [eos] if isinstance(eos, int) else list(eos or [])
    if tokenizer_eos_id is not None:
        ends.append(tokenizer_eos_id)
    length = _length(text, folder)
    return ModelFacts(
        vocab_size=_positive(text, "vocab_size", folder),
        max_model_len=min(length, max_model_len or length),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        defaults=_sampling_defaults(generation),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: expected a JSON object")
    return value


def _positive(config: Mapping[str, Any], name: str, folder: Path) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ModelFolderError(f"{folder / 'config.json'}: {name} is {value!r}, not a size")
    return value


def _length(config: Mapping[str, Any], folder: Path) -> int:
    for name in _LENGTH_NAMES:
        if config.get(name) is not None:
            return _positive(config, name, folder)
    raise ModelFolderError(f"{folder / 'config.json'}: none of {', '.join(_LENGTH_NAMES)} is there")


def _sampling_defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    """Take what fits; a value that no request might ask for is left out."""
    found: dict[str, Any] = {}
    for source, name, lowest, highest in (
        ("temperature", "temperature", 0.0, 2.0),
        ("top_p", "top_p", 0.0, 1.0),
        ("top_k", "top_k", 0, 2**31),
        ("min_p", "min_p", 0.0, 1.0),
        ("repetition_penalty", "repetition_penalty", 0.01, 100.0),
        ("max_new_tokens", "max_tokens", 1, 2**31),
    ):
        value = generation.get(source)
        if value is None:
            continue
        kinds = (int,) if isinstance(lowest, int) else (int, float)
        if type(value) in kinds and math.isfinite(value) and lowest <= value <= highest:
            found[name] = type(lowest)(value)
        else:
            log.warning("generation_default_unusable", name=source, value=value)
    if found.get("top_p") == 0.0:
        del found["top_p"]
    for name, neutral in _NOT_APPLIED.items():
        if generation.get(name, neutral) not in (None, neutral):
            log.warning("generation_default_not_applied", name=name, value=generation[name])
    return SamplingDefaults(**found)
