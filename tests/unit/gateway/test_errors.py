"""Every error has OpenAI's body, a status of its own, and is JSON for any parser."""

from __future__ import annotations

import json

import pytest

from gateway.errors import (
    ApiError,
    from_engine,
    internal,
    invalid,
    model_not_found,
    strict_json,
    too_busy,
    unavailable,
)
from wire.messages import ErrorCode


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (invalid("no", "n"), 400, "invalid_request_error"),
        (model_not_found("a", "b"), 404, "invalid_request_error"),
        (too_busy("full"), 429, "rate_limit_error"),
        (unavailable("away"), 503, "service_unavailable_error"),
        (internal(), 500, "server_error"),
    ],
)
def test_every_error_has_openais_body(error: ApiError, status: int, kind: str) -> None:
    body = json.loads(strict_json(error.body))["error"]
    assert (error.status, body["type"]) == (status, kind)
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"]


def test_who_is_asked_to_come_back_is_told_when() -> None:
    assert int(too_busy("full").headers["Retry-After"]) >= 1
    assert int(unavailable("away").headers["Retry-After"]) >= 1
    assert invalid("no").headers == {}


@pytest.mark.parametrize(
    ("code", "status"), [("invalid", 400), ("unavailable", 503), ("internal", 500), (None, 500)]
)
def test_the_engine_says_who_is_to_blame(code: ErrorCode | None, status: int) -> None:
    assert from_engine(code, "why").status == status
    assert from_engine(code, "why").message == "why"
    assert from_engine(code, None).message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_body_holds_a_number_that_json_has_not(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        strict_json({"error": value})
