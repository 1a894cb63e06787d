"""Requests measured against a model: lengths, ids, defaults, and what temperature 0 means."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.model_facts import ModelFacts, SamplingDefaults
from gateway.openai import ChatBody, parse
from gateway.sampling import (
    check_prompt,
    check_request,
    sampling_params,
    seeds,
    sibling,
    truncated,
)
from tests.fakes.bodies import completion
from wire.codec import encode
from wire.messages import EngineCoreRequest, SamplingParams, token_ids

FACTS = ModelFacts(vocab_size=1000, max_model_len=100, eos_token_ids=(2, 7))


def params(facts: ModelFacts = FACTS, num_prompt: int = 10, **fields: Any) -> SamplingParams:
    return sampling_params(completion(**fields), facts, num_prompt, seed=99)


def test_defaults_are_openais() -> None:
    assert params() == SamplingParams(
        max_tokens=16,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        seed=99,
        eos_token_ids=[2, 7],
        stop_token_ids=[],
    )


def test_the_models_own_defaults_hold_where_a_request_says_nothing() -> None:
    own = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.05, max_tokens=30)
    facts = ModelFacts(1000, 100, (2,), own)
    found = params(facts)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.6, 0.9, 40, 0.05)
    assert params(facts, temperature=1, top_k=0).temperature == 1.0
    assert params(facts, top_k=-1).top_k == 0
    chat = parse(ChatBody, b'{"messages": [{"role": "user", "content": "x"}]}')
    assert sampling_params(chat, facts, 10, 0).max_tokens == 30
    assert sampling_params(chat, FACTS, 10, 0).max_tokens == 90


def test_temperature_0_is_greedy_whatever_else_is_asked() -> None:
    found = params(temperature=0, top_p=0.5, top_k=7, min_p=0.1)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.0, 1.0, 0, 0.0)
    assert str(params(temperature=-0.0).temperature) == "0.0"


@pytest.mark.parametrize(("asked", "used"), [(1e-12, 0.01), (0.009, 0.01), (0.01, 0.01), (2, 2.0)])
def test_a_tiny_temperature_is_raised(asked: float, used: float) -> None:
    assert params(temperature=asked).temperature == used


@pytest.mark.parametrize(("asked", "used"), [(-1, 0), (0, 0), (1, 1), (999, 999), (1000, 0)])
def test_top_k_is_off_when_it_leaves_every_token(asked: int, used: int) -> None:
    assert params(top_k=asked).top_k == used


@pytest.mark.parametrize(("asked", "used"), [(1, 1), (90, 90), (91, 90), (100, 90)])
def test_output_is_clamped_to_the_room_that_is_left(asked: int, used: int) -> None:
    assert params(max_tokens=asked).max_tokens == used


def test_ignore_eos_keeps_the_stop_tokens_only() -> None:
    found = params(ignore_eos=True, stop_token_ids=[5, 5, 3])
    assert (found.eos_token_ids, found.stop_token_ids) == ([], [3, 5])


@pytest.mark.parametrize("seed", [-(2**63), -2, 0, 2**63 - 1])
def test_any_seed_fits_the_wire_and_differs_from_its_siblings(seed: int) -> None:
    base = params(seed=seed)
    siblings = [sibling(base, index) for index in range(128)]
    assert len({one.seed for one in siblings}) == 128
    assert siblings[0] == base
    for one in siblings:
        assert 0 <= one.seed < 2**63
        assert encode(EngineCoreRequest("a", "g", 1, token_ids([1]), one))


def test_seed_minus_one_is_none() -> None:
    assert params(seed=-1).seed == params().seed == 99


def test_drawn_seeds_repeat_with_a_seed_only() -> None:
    assert [*islice(seeds(5), 9)] == [*islice(seeds(5), 9)]
    assert [*islice(seeds(None), 9)] != [*islice(seeds(None), 9)]
    assert all(0 <= seed < 2**63 for seed in islice(seeds(None), 100))


def test_every_option_reaches_the_worker() -> None:
    found = sampling_params(
        completion(
            presence_penalty=1,
            frequency_penalty=-0.5,
            repetition_penalty=1.2,
            logit_bias={"7": 3, "2": -100},
            allowed_token_ids=[9, 3, 9],
            min_tokens=4,
        ),
        FACTS,
        10,
        seed=1,
        bad_words=[[5], [6, 7]],
    )
    assert (found.presence_penalty, found.frequency_penalty) == (1.0, -0.5)
    assert found.repetition_penalty == 1.2
    assert (found.bias_token_ids, found.bias_values) == (token_ids([7, 2]), [3.0, -100.0])
    assert found.allowed_token_ids == token_ids([3, 9])
    assert found.bad_words == [token_ids([5]), token_ids([6, 7])]
    assert found.min_tokens == 4
    assert encode(EngineCoreRequest("a", "g", 1, token_ids([1]), found))


def test_a_repetition_penalty_is_kept_where_logits_stay_finite() -> None:
    assert params(repetition_penalty=1e300).repetition_penalty == 1e6
    assert params(repetition_penalty=1e-300).repetition_penalty == 1e-6
    own = ModelFacts(1000, 100, (2,), SamplingDefaults(repetition_penalty=1.05))
    assert params(own).repetition_penalty == 1.05
    assert params(own, repetition_penalty=1).repetition_penalty == 1.0


@pytest.mark.parametrize(
    ("size", "side", "expected"),
    [
        (None, None, list(range(200))),
        (3, None, [197, 198, 199]),
        (3, "left", [197, 198, 199]),
        (3, "right", [0, 1, 2]),
        (0, None, []),
        (500, None, list(range(200))),
        (-1, None, list(range(200))[-84:]),  # of 100, with 16 of output
        (-1, "right", list(range(84))),
    ],
)
def test_a_prompt_is_cut_as_asked(size: int | None, side: str | None, expected: list[int]) -> None:
    asked = completion(truncate_prompt_tokens=size, truncation_side=side)
    assert truncated(list(range(200)), asked, FACTS) == expected


@pytest.mark.parametrize("asked", [1, 99, 100, 10**9])
def test_a_prompt_that_is_cut_to_fit_does_fit(asked: int) -> None:
    cut = truncated([1] * 500, completion(truncate_prompt_tokens=-1, max_tokens=asked), FACTS)
    check_prompt(cut, FACTS, "prompt")


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check_request(completion(**fields), FACTS)
    assert caught.value.status == 400
    return caught.value


def test_choices_need_a_temperature() -> None:
    assert refusal(n=2, temperature=0).param == "n"
    check_request(completion(n=2, temperature=0.01), FACTS)
    check_request(completion(n=1, temperature=0), FACTS)


def test_stop_tokens_are_tokens_of_the_model() -> None:
    check_request(completion(stop_token_ids=[0, 999]), FACTS)
    error = refusal(stop_token_ids=[1000])
    assert error.param == "stop_token_ids"
    assert "999" in error.message


@pytest.mark.parametrize("fields", [{"logit_bias": {"1000": 1}}, {"allowed_token_ids": [5, 1000]}])
def test_tokens_that_are_named_are_tokens_of_the_model(fields: dict[str, Any]) -> None:
    error = refusal(**fields)
    assert [error.param] == list(fields)
    assert "999" in error.message


def test_no_more_tokens_are_needed_than_are_allowed() -> None:
    check_request(completion(min_tokens=5, max_tokens=5), FACTS)
    assert refusal(min_tokens=6, max_tokens=5).param == "min_tokens"
    assert params(min_tokens=16, num_prompt=95).min_tokens == 5


def test_more_tokens_than_the_context_are_refused_with_both_numbers() -> None:
    check_request(completion(max_tokens=100), FACTS)
    error = refusal(max_tokens=101)
    assert "101" in error.message
    assert "100" in error.message


@pytest.mark.parametrize(
    ("ids", "reason"),
    [([], "no tokens"), ([1] * 100, "100"), ([1] * 500, "500"), ([1, 1000], "999")],
)
def test_a_prompt_that_the_model_cannot_take_is_refused(ids: list[int], reason: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_prompt(ids, FACTS, "prompt.3")
    assert caught.value.param == "prompt.3"
    assert reason in caught.value.message


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    check_prompt([999] * 99, FACTS, "prompt")
    assert params(num_prompt=99, max_tokens=5).max_tokens == 1
