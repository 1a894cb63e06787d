"""What a request may say: each field at its edges, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.openai import ChatBody, CompletionBody, unknown_fields
from tests.fakes.bodies import MESSAGES, chat, completion, refusal

INT64_MAX = 2**63 - 1

# Values as they stand in JSON, so that NaN and 1e400 can be written.
NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", '"0.7"', "true", "[]", "{}", "9" * 400]
OUT_OF_RANGE = [
    *[("temperature", value) for value in [*NO_NUMBERS, "-1e-9", "2.0000001"]],
    *[("top_p", value) for value in [*NO_NUMBERS, "0", "-0.1", "1.0000001"]],
    *[("min_p", value) for value in [*NO_NUMBERS, "-1e-9", "1.0000001"]],
    *[("presence_penalty", value) for value in [*NO_NUMBERS, "-2.0000001", "2.0000001", "1e9"]],
    *[("frequency_penalty", value) for value in [*NO_NUMBERS, "-2.0000001", "2.0000001"]],
    *[("repetition_penalty", value) for value in [*NO_NUMBERS, "0", "-1", "-1e-9"]],
    *[("min_tokens", value) for value in [*NO_NUMBERS, "-1", "1.0", str(2**63)]],
    *[("allowed_token_ids", value) for value in ["[]", "[-1]", "[1.0]", "[true]", "5", '"5"']],
    *[("bad_words", value) for value in ['[""]', '"x"', "[1]", "{}", json.dumps(["x"] * 129)]],
    *[("logit_bias", value) for value in ["[]", "5", '{"-1": 1}', '{"x": 1}', '{"1.5": 1}']],
    *[("logit_bias", f'{{"5": {value}}}') for value in ["1e400", '"1"', "true", "null", "[]"]],
    *[("logit_bias", f'{{"{2**32}": 1}}'), ("logit_bias", '{"05": 1}')],
    *[("truncate_prompt_tokens", value) for value in [*NO_NUMBERS, "-2", "1.5", str(2**63)]],
    *[("logprobs", value) for value in [*NO_NUMBERS, "-1", "21", "1.0", "1000000000"]],
    *[("prompt_logprobs", value) for value in [*NO_NUMBERS, "-1", "21", "1.0"]],
    *[("truncation_side", value) for value in ['"up"', "1", '""']],
    *[("top_k", value) for value in [*NO_NUMBERS, "-2", "2.5", "2.0", str(2**63)]],
    *[("n", value) for value in [*NO_NUMBERS, "0", "-1", "129", "1000000", "1.0"]],
    *[("seed", value) for value in [*NO_NUMBERS, "1.5", str(2**63), str(2**64), str(-(2**63) - 1)]],
    *[("max_tokens", value) for value in [*NO_NUMBERS, "-1", "1.0", "0", str(2**63)]],
    *[("max_completion_tokens", value) for value in [*NO_NUMBERS, "0", "1.0"]],
    *[("priority", value) for value in ["true", "1.0", '"1"', str(2**63)]],
    *[("deadline_ms", value) for value in ["true", "0", "-1", "1.5", str(2**63)]],
    *[("stream", value) for value in ["1", '"true"', "[]"]],
    *[("echo", value) for value in ["1", '"true"']],
    *[("ignore_eos", value) for value in ["1", '"true"']],
    *[("return_token_ids", value) for value in ["1"]],
    *[("skip_special_tokens", value) for value in ["0"]],
    *[("model", value) for value in ["1", "[]"]],
    *[("stop", value) for value in ['""', '["a", ""]', "1", '["a",1]', '["a","b","c","d","e"]']],
    *[("stop", json.dumps("x" * 1001))],
    *[("stop_token_ids", value) for value in ["[-1]", "[1.0]", "[true]", "5", f"[{2**32}]"]],
    *[("cache_salt", json.dumps(value)) for value in ["", "a@b", "a/b", "a\\b", "a\0b", "x" * 129]],
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE)
def test_a_bad_value_is_refused_by_name(field: str, value: str) -> None:
    error = refusal(f'{{"prompt": "x", "{field}": {value}}}'.encode())
    is_json = value not in ("NaN", "Infinity", "-Infinity")
    if is_json:
        assert error.param is not None
        assert error.param.split(".")[0] == field
        assert field in error.message
    assert len(error.message) < 500


IN_RANGE = [
    *[("temperature", value) for value in (0, 0.0, 1e-9, 1, 2, 2.0)],
    *[("top_p", value) for value in (1e-9, 0.5, 1)],
    *[("top_k", value) for value in (-1, 0, 1, 10**9, INT64_MAX)],
    *[("presence_penalty", value) for value in (-2, 0, 2, 0.5)],
    *[("frequency_penalty", value) for value in (-2.0, 0, 2)],
    *[("repetition_penalty", value) for value in (1e-300, 1, 1e300)],
    *[("min_tokens", value) for value in (0, 16)],
    *[("allowed_token_ids", value) for value in ([0], [5, 5, 2**32 - 1])],
    *[("bad_words", value) for value in ([], ["x"] * 128)],
    *[("truncate_prompt_tokens", value) for value in (-1, 0, 1, INT64_MAX)],
    *[("min_p", value) for value in (0, 0.5, 1)],
    *[("n", value) for value in (1, 128)],
    *[("seed", value) for value in (-1, 0, INT64_MAX, -(2**63))],
    *[("max_tokens", value) for value in (1, 10**9)],
    *[("priority", value) for value in (-(2**63), INT64_MAX)],
    *[("stop", value) for value in ([], ["a"], ["a", "b", "c", "d"])],
    *[("cache_salt", value) for value in ("a", "x" * 128)],
]


@pytest.mark.parametrize(("field", "value"), IN_RANGE)
def test_a_good_value_is_kept(field: str, value: Any) -> None:
    assert getattr(completion(**{field: value}), field) == value


def test_a_bias_has_token_ids_as_keys_and_is_clamped() -> None:
    body = completion(logit_bias={"5": 1, "0": -100.5, "4294967295": 1e30})
    assert body.logit_bias == {5: 1.0, 0: -100.0, 2**32 - 1: 100.0}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ("", [""]),  # whether that is a prompt is for the tokenizer to say
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        (["x"] * 1024, ["x"] * 1024),
        ([2**32 - 1], [[2**32 - 1]]),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize(
    "prompt",
    [
        "null",
        "5",
        "{}",
        "[]",
        "[[]]",
        '["a", []]',
        "[-1]",
        f"[{2**32}]",
        f"[{2**63}]",
        "[1.0]",
        "[true]",
        "[1, true]",
        '[1, "a"]',
        '["a", 1]',
        "[[[1]]]",
        "[null]",
        json.dumps(["x"] * 1025),
        '["\\ud800"]',
    ],
)
def test_anything_else_is_no_prompt(prompt: str) -> None:
    error = refusal(f'{{"prompt": {prompt}}}'.encode())
    assert error.param in ("prompt", None)


def test_a_prompt_is_required() -> None:
    assert refusal(b"{}").param == "prompt"
    assert "required" in refusal(b"{}").message
    assert refusal(b"{}", ChatBody).param == "messages"


def test_no_tokens_are_allowed_with_an_echo_only() -> None:
    assert completion(max_tokens=0, echo=True).asked_tokens == 0
    assert "echo" in refusal(b'{"prompt": "x", "max_tokens": 0}').message
    assert refusal(json.dumps({"messages": MESSAGES, "max_tokens": 0}).encode(), ChatBody)


def test_a_completion_has_16_tokens_by_default_and_a_chat_what_there_is_room_for() -> None:
    assert completion().asked_tokens == completion(max_tokens=None).asked_tokens == 16
    assert chat().asked_tokens is None
    assert chat(max_tokens=3).asked_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=5).asked_tokens == 5


NEUTRAL = [
    {"logprobs": None},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    {"logit_bias": {}},
    {"response_format": {"type": "text"}},
    {"best_of": 1},
    {"min_tokens": 0},
    {"use_beam_search": False},
    {"bad_words": []},
]


@pytest.mark.parametrize("fields", NEUTRAL)
def test_a_value_that_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert completion(**fields)
    assert chat(**fields)


UNSUPPORTED: list[tuple[str, Any]] = [
    ("best_of", 2),
    ("use_beam_search", True),
    ("guided_json", {}),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED)
@pytest.mark.parametrize("cls", [CompletionBody, ChatBody])
def test_what_cannot_be_honoured_is_refused_and_never_ignored(
    cls: type[Any], field: str, value: Any
) -> None:
    error = refusal(json.dumps({"prompt": "x", "messages": MESSAGES, field: value}).encode(), cls)
    assert error.param == field
    assert field in error.message
    assert "not supported" in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [("suffix", "x"), ("prompt_embeds", "x")],
)
def test_a_completion_refuses_what_only_it_could_have(field: str, value: Any) -> None:
    assert refusal(json.dumps({"prompt": "x", field: value}).encode()).param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("chat_template", "{{ messages }}"),
        ("documents", [{"text": "x"}]),
        ("modalities", ["audio"]),
        ("audio", {}),
        ("echo", True),
    ],
)
def test_a_chat_refuses_what_only_it_could_have(field: str, value: Any) -> None:
    error = refusal(json.dumps({"messages": MESSAGES, field: value}).encode(), ChatBody)
    assert error.param == field


def test_fields_that_nobody_knows_are_ignored() -> None:
    strange = {"metadata": {"a": [1]}, "store": True, "service_tier": "auto", "top_a": 2**70}
    assert completion(**strange)
    assert unknown_fields(CompletionBody, {"prompt": 1, "tools": 1, "suffix": 1}) == ["tools"]


def test_a_body_is_a_json_object() -> None:
    for raw in (b"", b"[]", b"null", b'"x"', b"{", b'{"prompt": "x"}x', b"\xff", b"[" * 10_000):
        assert refusal(raw).code == "invalid_json"
    nested = b'{"prompt": "x", "metadata": ' + b"[" * 2000 + b"]" * 2000 + b"}"
    assert refusal(nested).code == "invalid_json"


def test_an_echo_shows_the_prompts_logprobs_as_well() -> None:
    assert completion(logprobs=2).num_prompt_logprobs is None
    assert completion(logprobs=2, echo=True).num_prompt_logprobs == 2
    assert completion(logprobs=2, echo=True, prompt_logprobs=5).num_prompt_logprobs == 5
    assert completion(prompt_logprobs=0).num_prompt_logprobs == 0


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"logprobs": 1, "echo": True}])
def test_logprobs_of_a_prompt_come_at_once(fields: dict[str, Any]) -> None:
    error = refusal(json.dumps({"prompt": "x", "stream": True, **fields}).encode())
    assert error.param in fields


def test_stream_options_need_a_stream() -> None:
    body = completion(stream=True, stream_options={"include_usage": True})
    assert (body.wants_usage, body.wants_running_usage) == (True, False)
    assert refusal(b'{"prompt": "x", "stream_options": {}}').param == "stream_options"
    wrong = b'{"prompt": "x", "stream": true, "stream_options": {"include_usage": 1}}'
    assert refusal(wrong).param == "stream_options.include_usage"


@pytest.mark.parametrize("cls", [CompletionBody, ChatBody])
def test_the_bodies_describe_themselves(cls: type[Any]) -> None:
    schema = cls.model_json_schema()
    assert set(schema["properties"]) == set(cls.model_fields)
    assert schema["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
