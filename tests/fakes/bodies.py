"""Bodies of requests as the gateway parses them, and how it refuses the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import ApiError, strict_json
from gateway.openai import ChatBody, CompletionBody, parse

MESSAGES = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": MESSAGES, **fields}).encode())


def refusal(raw: bytes, cls: type[Any] = CompletionBody) -> ApiError:
    """The error of a body; it must be strict JSON whatever the body was."""
    with pytest.raises(ApiError) as caught:
        parse(cls, raw)
    assert caught.value.status == 400
    json.loads(strict_json(caught.value.body), parse_constant=pytest.fail)
    return caught.value
