"""What a model folder says, and what is made of one that says nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.model_facts import ModelFolderError, SamplingDefaults, read_facts

CONFIG = {"vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 2}


def write(folder: Path, config: Any = CONFIG, generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_the_configuration_is_enough(tmp_path: Path) -> None:
    facts = read_facts(write(tmp_path))
    assert (facts.vocab_size, facts.max_model_len, facts.eos_token_ids) == (100, 64, (2,))
    assert facts.defaults == SamplingDefaults()


def test_ends_come_from_generation_config_and_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path, generation={"eos_token_id": [5, 7]})
    assert read_facts(folder).eos_token_ids == (5, 7)
    assert read_facts(folder, tokenizer_eos_id=7).eos_token_ids == (5, 7)
    assert read_facts(folder, tokenizer_eos_id=9).eos_token_ids == (5, 7, 9)


@pytest.mark.parametrize(("limit", "length"), [(None, 64), (32, 32), (100, 64)])
def test_a_setting_may_shorten_the_context(tmp_path: Path, limit: int | None, length: int) -> None:
    assert read_facts(write(tmp_path), limit).max_model_len == length


def test_the_text_part_of_a_larger_model_is_found(tmp_path: Path) -> None:
    nested = {"text_config": CONFIG, "vision_config": {"vocab_size": 1}}
    assert read_facts(write(tmp_path, nested)).vocab_size == 100


def test_sampling_defaults_are_taken_where_they_make_sense(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 40}
    generation["repetition_penalty"] = 1.05
    found = read_facts(write(tmp_path, generation=generation)).defaults
    assert found == SamplingDefaults(0.6, 0.9, 20, 0.0, 1.05, 40)
    nonsense = {"temperature": -1, "top_p": "high", "top_k": True, "min_p": 2, "max_new_tokens": 0}
    assert read_facts(write(tmp_path, generation=nonsense)).defaults == SamplingDefaults()


@pytest.mark.parametrize(
    "config",
    [[], {}, {"vocab_size": 5}, {**CONFIG, "vocab_size": 0}, {**CONFIG, "vocab_size": "many"}],
)
def test_a_folder_that_cannot_be_served_says_why(tmp_path: Path, config: Any) -> None:
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        read_facts(write(tmp_path, config))


def test_a_folder_without_a_configuration_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        read_facts(tmp_path)
