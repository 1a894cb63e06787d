"""The numbers that clients get over HTTP are those of `transformers` alone: float32, demo model.

Log-probabilities are compared within TOLERANCE; tokens under penalties and bans, greedy and drawn,
with those of a reference that is written as plainly as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.fakes.plain_sampling import plain_answer
from tests.fakes.running_stack import PAGESTREAM, RunningStack, model_folder
from wire.messages import SamplingParams, token_ids

pytestmark = pytest.mark.e2e

TOLERANCE = 1e-3
NUM_TOKENS = 12
TEXT = "The quick brown fox jumps over the lazy dog, and the dog"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[RunningStack]:
    command = [*PAGESTREAM, "up", "--set=DTYPE=float32"]
    running = RunningStack(command, tmp_path_factory.mktemp("float32") / "data", models)
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def model(models: Path) -> Any:
    torch.set_num_threads(1)  # several are far slower when something else runs beside them
    return AutoModelForCausalLM.from_pretrained(model_folder(models), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(models: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder(models))


@pytest.fixture(scope="module")
def logprobs_of(model: Any) -> Callable[[list[int]], torch.Tensor]:
    """Row i: log-probabilities of the token behind tokens [0, i]."""

    def ask(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return logits[0].log_softmax(-1)

    return ask


def close(found: float, row: torch.Tensor, token: int) -> bool:
    return abs(found - float(row[token])) <= TOLERANCE


def is_top(found: list[float], row: torch.Tensor) -> bool:
    """Whether these are the largest values of a row, in order."""
    best = row.topk(len(found)).values.tolist()
    return all(abs(one - other) <= TOLERANCE for one, other in zip(found, best, strict=True))


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_log_probabilities_of_a_completion(
    up: RunningStack, tokenizer: Any, logprobs_of: Any, temperature: float
) -> None:
    """Echoed, so the prompt's are there as well; and the prompt's by themselves."""
    prompt = tokenizer(TEXT).input_ids
    asked = {"prompt": TEXT, "max_tokens": NUM_TOKENS, "temperature": temperature, "seed": 3}
    asked |= {"echo": True, "logprobs": 4, "prompt_logprobs": 3, "return_token_ids": True}
    [choice] = up.post(COMPLETIONS, asked)["choices"]
    output = choice["token_ids"]
    tokens = prompt + output
    rows = logprobs_of(tokens)
    lists = choice["logprobs"]
    assert lists["token_logprobs"][0] is None
    assert len(lists["token_logprobs"]) == len(tokens)
    for place in range(1, len(tokens)):
        row = rows[place - 1]
        assert close(lists["token_logprobs"][place], row, tokens[place])
        alternatives = lists["top_logprobs"][place]
        own = alternatives[lists["tokens"][place]]
        best = sorted(alternatives.values(), reverse=True)
        assert own == lists["token_logprobs"][place]
        assert is_top(best[:4], row)
        assert choice["text"][lists["text_offset"][place] :].startswith(lists["tokens"][place])
    assert len(choice["prompt_logprobs"]) == len(prompt)
    for place, known in enumerate(choice["prompt_logprobs"][1:], start=1):
        row = rows[place - 1]
        for token, one in known.items():
            assert close(one["logprob"], row, int(token))
        rank = known[str(prompt[place])]["rank"]
        better = int((row > row[prompt[place]] + TOLERANCE).sum())
        assert better < rank <= int((row >= row[prompt[place]] - TOLERANCE).sum())


def test_log_probabilities_of_a_prompt_alone(
    up: RunningStack, tokenizer: Any, logprobs_of: Any
) -> None:
    prompt = tokenizer(TEXT).input_ids
    asked = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    [choice] = up.post(COMPLETIONS, asked)["choices"]
    assert choice["text"] == TEXT
    rows = logprobs_of(prompt)
    values = choice["logprobs"]["token_logprobs"]
    assert all(close(v, rows[i], prompt[i + 1]) for i, v in enumerate(values[1:]))


def test_log_probabilities_of_a_chat(up: RunningStack, tokenizer: Any, logprobs_of: Any) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    asked = {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": True}
    asked |= {"top_logprobs": 5, "return_token_ids": True}
    answer = up.post("/v1/chat/completions", asked)
    assert answer["prompt_token_ids"] == prompt
    [choice] = answer["choices"]
    output, content = choice["token_ids"], choice["logprobs"]["content"]
    rows = logprobs_of(prompt + output)
    assert len(content) == len(output)
    for place, (token, entry) in enumerate(zip(output, content, strict=True), len(prompt) - 1):
        assert close(entry["logprob"], rows[place], token)
        assert is_top([one["logprob"] for one in entry["top_logprobs"]], rows[place])


RULES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "a negative frequency": {"frequency_penalty": -2.0},
    "repetition": {"repetition_penalty": 1.4},
    "all three": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
    },
    "a bias": {"logit_bias": {"260": 4.5, "253": -100}},
    "allowed tokens": {"allowed_token_ids": [260, 282, 284, 30, 28, 253]},
    "a floor": {"min_tokens": NUM_TOKENS, "stop_token_ids": [28, 30, 260]},
    "bad words": {"bad_words": ["is", "a"]},
}
DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 11},
    "drawn from the likely": {"temperature": 1.2, "min_p": 0.05, "seed": 12},
}


def sampling_of(fields: dict[str, Any], tokenizer: Any) -> SamplingParams:
    """What these fields of a request mean, put down by hand."""
    given = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, **fields}
    bias, words = given.pop("logit_bias", {}), given.pop("bad_words", [])
    spelled = [tokenizer(f"{space}{word}").input_ids for word in words for space in ("", " ")]
    return SamplingParams(
        max_tokens=NUM_TOKENS,
        bias_token_ids=token_ids(list(map(int, bias))),
        bias_values=list(map(float, bias.values())),
        bad_words=[token_ids(ids) for ids in spelled],
        allowed_token_ids=token_ids(given.pop("allowed_token_ids", [])),
        **given,
    )


@pytest.fixture(scope="module")
def without_rules(model: Any, tokenizer: Any) -> list[int]:
    prompt = tokenizer(TEXT).input_ids
    return plain_answer(model, prompt, SamplingParams(NUM_TOKENS, 0.0), NUM_TOKENS)


CASES = [
    *[(rules, draw) for rules in RULES for draw in ("greedy", "drawn")],
    *[(rules, "drawn from the likely") for rules in ("nothing", "all three")],
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_penalties_and_bans_are_the_plain_ones(
    up: RunningStack,
    model: Any,
    tokenizer: Any,
    without_rules: list[int],
    case: tuple[str, str],
) -> None:
    rules, draw = case
    fields = {**RULES[rules], **DRAWS[draw]}
    prompt = tokenizer(TEXT).input_ids
    asked = {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
    [choice] = up.post(COMPLETIONS, {**asked, "return_token_ids": True})["choices"]
    how = sampling_of(fields, tokenizer)
    assert choice["token_ids"] == plain_answer(model, prompt, how, NUM_TOKENS)
    if rules != "nothing" and draw == "greedy":
        assert choice["token_ids"] != without_rules, "this case shows nothing"
