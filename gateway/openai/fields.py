"""Types of fields that need words of ours, since they have several forms or limits of their own."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from gateway.openai.body import wrong

MAX_PROMPTS = 1024  # in one request
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1000  # characters of one stop string
MAX_TOKEN_IDS = 1024  # in one list of a request that is no prompt
MAX_BIAS = 100.0
MAX_BAD_WORDS = 128

INT64_MAX = 2**63 - 1
_TOKEN_ID_MAX = 2**32 - 1
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

Int64 = Annotated[int, Field(ge=-(2**63), le=INT64_MAX)]
TokenId = Annotated[int, Field(ge=0, le=_TOKEN_ID_MAX)]
Prompt = str | list[int]


def _one_prompt(value: Any) -> Prompt:
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong("must be a string, a list of token ids, or a list of those")
    if not value:
        raise wrong("must not be empty")
    if any(type(token_id) is not int for token_id in value):
        raise wrong("a list of token ids holds integers only")
    if not (min(value) >= 0 and max(value) <= _TOKEN_ID_MAX):
        raise wrong(f"a token id is from 0 to {_TOKEN_ID_MAX}")
    return value


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or several; a list of integers is one."""
    is_several = type(value) is list and value and type(value[0]) in (str, list)
    if not is_several:
        return [_one_prompt(value)]
    if len(value) > MAX_PROMPTS:
        raise wrong(f"{len(value)} prompts in one request; at most {MAX_PROMPTS} are allowed")
    return [_one_prompt(prompt) for prompt in value]


def _stop(value: Any) -> list[str]:
    strings = [value] if type(value) is str else value
    if type(strings) is not list or any(type(string) is not str for string in strings):
        raise wrong("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise wrong(f"at most {MAX_STOP_STRINGS} strings are allowed")
    if not all(1 <= len(string) <= MAX_STOP_LENGTH for string in strings):
        raise wrong(f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
    return strings


def _logit_bias(value: Any) -> dict[int, float]:
    """Token ids, as JSON writes keys, to what is added to their logits; beyond the limit is it."""
    if type(value) is not dict:
        raise wrong("must be an object with token ids as its keys")
    if len(value) > MAX_TOKEN_IDS:
        raise wrong(f"at most {MAX_TOKEN_IDS} tokens are allowed")
    found = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) > _TOKEN_ID_MAX:
            raise wrong("a key is a token id in decimal digits", key[:40])
        if type(bias) not in (int, float) or not math.isfinite(bias):
            raise wrong("must be a finite number", key)
        found[int(key)] = float(max(-MAX_BIAS, min(MAX_BIAS, bias)))
    return found


def _text_of(*kinds: str, may_be_empty: bool = False) -> Callable[[Any], str]:
    """Text of a message. Parts are joined by newlines, so one part is the same as a string."""
    allowed = " or ".join(map(repr, kinds))

    def read(value: Any) -> str:
        if type(value) is str:
            return value
        if type(value) is not list or not (value or may_be_empty):
            raise wrong("must be a string or a list of text parts")
        texts = []
        for number, part in enumerate(value):
            kind = part.get("type") if type(part) is dict else None
            if kind not in kinds:
                reason = f"must be of type {allowed}; other types are not supported"
                raise wrong(f"part {number} {reason}")
            if type(part.get("text")) is not str:
                raise wrong(f"part {number} must have a string as its 'text'")
            texts.append(part["text"])
        return "\n".join(texts)

    return read


Prompts = Annotated[
    list[Prompt],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stop = Annotated[list[str], PlainValidator(_stop, json_schema_input_type=str | list[str])]
LogitBias = Annotated[
    dict[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])
]
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
    Field(max_length=MAX_BAD_WORDS),
]
Content = Annotated[
    str, PlainValidator(_text_of("text"), json_schema_input_type=str | list[dict[str, Any]])
]
ItemText = Annotated[
    str,
    PlainValidator(
        _text_of(
            *("input_text", "output_text", "reasoning_text", "summary_text"), may_be_empty=True
        ),
        json_schema_input_type=str | list[dict[str, Any]],
    ),
]
