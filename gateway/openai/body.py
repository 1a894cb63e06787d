"""Reading a body, and what all bodies share: strictness, and words for what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from gateway.errors import invalid

log = structlog.get_logger()

R = TypeVar("R", bound="Body")


def parse(cls: type[R], body: bytes) -> R:
    """Read a request body. Raises ApiError that names the field and what is allowed."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    if ignored := unknown_fields(cls, value):
        log.debug("fields_ignored", fields=ignored)
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param, sentence = _sentence(first)
        raise invalid(sentence, param=param or None, code="invalid_value") from None


def unknown_fields(cls: type[Body], names: Mapping[str, Any]) -> list[str]:
    """Name the fields of a body that are ignored."""
    return sorted(set(names) - set(cls.model_fields) - set(cls.unsupported))


def wrong(reason: str, field: str | None = None) -> PydanticCustomError:
    """Say what is wrong with a value, or with one of its fields."""
    context = {"reason": reason} if field is None else {"reason": reason, "field": field}
    return PydanticCustomError("value", "{reason}", context)


def _sentence(error: ErrorDetails) -> tuple[str, str]:
    """Say which field is wrong and why."""
    place = [*error["loc"], *[v for k, v in error.get("ctx", {}).items() if k == "field"]]
    param = ".".join(map(str, place))
    if error["type"] == "missing":
        return param, f"{param} is required"
    reason = error["msg"].replace("Input should be", "must be", 1)
    return param, f"{param}: {reason}" if param else reason


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing. A bool is not the number it equals."""
    return any(isinstance(value, bool) == isinstance(n, bool) and value == n for n in neutral)


class Body(BaseModel):
    """What all bodies share: strictness, and the refusal of what cannot be done."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that cannot be honoured, with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_cannot_be_done(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        for name, neutral in cls.unsupported.items():
            if name in given and not _is_neutral(given[name], neutral):
                allowed = " or ".join(["null", *map(repr, neutral)])
                raise wrong(f"not supported by this server; it may only be {allowed}", name)
        return given


class ModelBody(Body):
    """A body that may name the model."""

    model: str | None = None
