"""Rows are held to their grammars, whatever the schedule does, and a bad one is one row's fault."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from gpu_worker.attention.torch import TorchAttention
from gpu_worker.grammars import GrammarCompiler
from gpu_worker.model_loader import LoadedModel
from gpu_worker.model_runner import ModelRunner
from gpu_worker.request_states import Capacity
from tests.fakes import tiny_models
from tests.fakes.plain_sampling import plain_answer
from tests.fakes.schedules import execute, play, random_prompts
from tests.fakes.step_driver import GREEDY, StepDriver
from tests.fakes.tokenizers import ascii_tokenizer
from wire import grammars
from wire.grammars import GrammarTokenizer
from wire.messages import SamplingParams

VOCAB = tiny_models.VOCAB
END = 95
NUM_TOKENS = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def held(grammar: str, **fields: Any) -> SamplingParams:
    return replace(GREEDY, grammar=grammar, eos_token_ids=[END], **fields)


ASKING = [
    held(grammars.of_json_schema(SCHEMA)),
    held(grammars.of_json_schema(SCHEMA), temperature=1.2, seed=4),
    held(grammars.of_regex("[a-f]{3,9}-[0-9]+!")),
    held(grammars.of_choice(["yes", 'no "quoted"', "not now"])),
    held(grammars.of_grammar('root ::= "a" root | "b"'), repetition_penalty=1.2),
    GREEDY,
]


def text_of(tokens: list[int]) -> str:
    """Printable ASCII in order, up to the end mark."""
    end = tokens.index(END) if END in tokens else len(tokens)
    assert all(token == END for token in tokens[end:]), "something comes behind the end"
    return "".join(chr(32 + token) for token in tokens[:end])


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ascii")
    ascii_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def compiler(tokenizer_folder: Path) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer_folder, VOCAB)
    yield made
    made.close()


@pytest.fixture
def runner(tiny_model: Callable[[str], LoadedModel], compiler: GrammarCompiler) -> ModelRunner:
    model = tiny_model("llama")
    capacity = Capacity(64, 16, tiny_models.MAX_LEN, 16, 256, VOCAB)
    return ModelRunner(model, TorchAttention(16, torch.float32, model.device), capacity, compiler)


def test_no_schedule_changes_an_answer_that_is_held_to_a_grammar(
    runner: ModelRunner, tiny_folder: Callable[[str], Path], tokenizer_folder: Path
) -> None:
    """With preemptions in mid-grammar. The plain way reads all the output anew for each token."""
    prompts = random_prompts(len(ASKING), seed=6)
    model = tiny_models.reference(tiny_folder("llama"))
    tokenizer = GrammarTokenizer(tokenizer_folder, VOCAB, [END])
    expected = [
        plain_answer(model, prompt, how, NUM_TOKENS, tokenizer)
        for prompt, how in zip(prompts, ASKING, strict=True)
    ]
    for seed in (1, 2):
        found = play(runner, prompts, ASKING, NUM_TOKENS, seed=seed)
        assert found == expected
        runner.reset()
    for tokens in expected[:2]:
        assert END in tokens, "the grammar has room for more than the test"
        jsonschema.validate(json.loads(text_of(tokens)), SCHEMA)
    assert re.fullmatch("[a-f]{3,9}-[0-9]+(!?)", text_of(expected[2]))
    assert text_of(expected[3]) in ("yes", 'no "quoted"', "not now")
    assert re.fullmatch("a*b?", text_of(expected[4]))


def test_a_grammar_that_is_none_fails_its_own_request(runner: ModelRunner) -> None:
    driver = StepDriver(64, 16)
    bad = held(grammars.of_json_schema({"type": "notatype"}))
    empty = held(grammars.of_json_schema({"$ref": "#"}))
    for req, how in enumerate((ASKING[3], bad, empty), start=1):
        driver.add(req, [1, 2, 3], how)
    result = execute(runner, driver.step(start={1: 3, 2: 3, 3: 3}))
    assert {(error.req, error.code) for error in result.errors} == {(2, "invalid"), (3, "invalid")}
    messages = {error.req: error.message for error in result.errors}
    assert "notatype" in messages[2]
    assert "allows nothing" in messages[3]


def test_a_worker_without_a_tokenizer_refuses_grammars(
    make_runner: Callable[..., ModelRunner],
) -> None:
    driver = StepDriver(64, 16)
    driver.add(1, [1, 2, 3], ASKING[0])
    result = execute(make_runner(), driver.step(start={1: 3}))
    assert [error.req for error in result.errors] == [1]


def test_a_grammar_is_compiled_once_and_by_nobody_who_asks(compiler: GrammarCompiler) -> None:
    first = compiler.begin(ASKING[0])
    assert compiler.begin(ASKING[1]) is first
    assert compiler.begin(ASKING[2]) is not first
    assert not first.result().is_error()


def test_only_so_many_grammars_are_kept(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_worker.grammars.NUM_KEPT", 2)
    first = compiler.begin(ASKING[0])
    compiler.begin(ASKING[2])
    assert compiler.begin(ASKING[0]) is first, "it was used a moment ago"
    compiler.begin(ASKING[3])
    second = compiler.begin(ASKING[2])
    compiler.begin(ASKING[4])
    assert compiler.begin(ASKING[2]) is second
    assert compiler.begin(ASKING[0]) is not first
