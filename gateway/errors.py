"""What goes wrong for a client, as a status and an OpenAI error body.

Owns the error shapes. Knows nothing of HTTP libraries: whoever answers turns an ApiError into a
response, or into one event of a stream that has begun.
"""

from __future__ import annotations

import json
import math
from typing import Any

from wire.messages import ErrorCode

RETRY_SOON_S = 1
RETRY_LATER_S = 5

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class ApiError(Exception):
    """A request that gets no answer; the text is for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.is_refusal = False  # the queue did not take it: nothing was begun

    @property
    def body(self) -> dict[str, Any]:
        """The OpenAI error body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response: when to come back, if that helps, and with what."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is at fault."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(asked: str, served: str) -> ApiError:
    """404: another model than the one that is served."""
    message = f"the model {asked[:200]!r} does not exist; this server has {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def not_found(message: str) -> ApiError:
    """404: it does not exist, or it is somebody else's."""
    return ApiError(404, message, code="not_found")


def too_busy(message: str, retry_after_s: int = RETRY_SOON_S) -> ApiError:
    """429: full for now."""
    return ApiError(
        429, message, kind="rate_limit_error", code="queue_full", retry_after_s=retry_after_s
    )


def over_quota(what: str, wait_s: float) -> ApiError:
    """429: the tenant has had its share of this minute, in requests or in tokens."""
    return ApiError(
        429,
        f"the {what} that this tenant may ask for in a minute are used up",
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        retry_after_s=max(RETRY_SOON_S, math.ceil(wait_s)),
    )


def unavailable(message: str, retry_after_s: int = RETRY_SOON_S) -> ApiError:
    """503: the moment is at fault."""
    return ApiError(
        503,
        message,
        kind="service_unavailable_error",
        code="unavailable",
        retry_after_s=retry_after_s,
    )


def internal(message: str = "the server failed to answer this request") -> ApiError:
    """500: we are at fault."""
    return ApiError(500, message, kind="server_error", code="internal")


def from_engine(code: ErrorCode | None, message: str | None) -> ApiError:
    """Say to the client what the engine says of a request that ended with an error."""
    match code:
        case "invalid":
            return invalid(message or "the request was refused")
        case "unavailable":
            return unavailable(message or "the request cannot be served now")
        case "internal" | None:
            return internal(message or "the request failed while it was generated")


def strict_json(value: object) -> str:
    """Write JSON that any parser takes. ValueError for NaN and infinities."""
    return _ENCODER.encode(value)
