"""What clients may ask: the request bodies of the OpenAI endpoints, with vLLM's further options.

These models are the one truth about requests. Strict: a bool is no number, a string is no number, a
number is finite and an integer has 64 bits at most. `null` means "not given". A field that would
change the answer and cannot be honoured is refused by name; a field nobody knows is ignored, and
named in a debug log. Otherwise pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from gateway.errors import invalid

log = structlog.get_logger()

MAX_PROMPTS = 1024  # in one request
MAX_CHOICES = 128
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1000  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1024

_INT64_MAX = 2**63 - 1
_TOKEN_ID_MAX = 2**32 - 1

Int64 = Annotated[int, Field(ge=-(2**63), le=_INT64_MAX)]
TokenId = Annotated[int, Field(ge=0, le=_TOKEN_ID_MAX)]
Prompt = str | list[int]

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


def _sentence(error: ErrorDetails) -> tuple[str, str]:
    """Say which field is wrong and why."""
    place = [*error["loc"], *[v for k, v in error.get("ctx", {}).items() if k == "field"]]
    param = ".".join(map(str, place))
    if error["type"] == "missing":
        return param, f"{param} is required"
    reason = error["msg"].replace("Input should be", "must be", 1)
    return param, f"{param}: {reason}" if param else reason


# ---------------------------------------------------------------- fields that need words of ours


def _wrong(reason: str) -> PydanticCustomError:
    return PydanticCustomError("value", "{reason}", {"reason": reason})


def _one_prompt(value: Any) -> Prompt:
    if type(value) is str:
        return value
    if type(value) is not list:
        raise _wrong("must be a string, a list of token ids, or a list of those")
    if not value:
        raise _wrong("must not be empty")
    if any(type(token_id) is not int for token_id in value):
        raise _wrong("a list of token ids holds integers only")
    if not (min(value) >= 0 and max(value) <= _TOKEN_ID_MAX):
        raise _wrong(f"a token id is from 0 to {_TOKEN_ID_MAX}")
    return value


def _prompts(value: Any) -> list[Prompt]:
    """One prompt or several; a list of integers is one."""
    is_several = type(value) is list and value and type(value[0]) in (str, list)
    if not is_several:
        return [_one_prompt(value)]
    if len(value) > MAX_PROMPTS:
        raise _wrong(f"{len(value)} prompts in one request; at most {MAX_PROMPTS} are allowed")
    return [_one_prompt(prompt) for prompt in value]


def _stop(value: Any) -> list[str]:
    strings = [value] if type(value) is str else value
    if type(strings) is not list or any(type(string) is not str for string in strings):
        raise _wrong("must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise _wrong(f"at most {MAX_STOP_STRINGS} strings are allowed")
    if not all(1 <= len(string) <= MAX_STOP_LENGTH for string in strings):
        raise _wrong(f"a stop string has 1 to {MAX_STOP_LENGTH} characters")
    return strings


def _content(value: Any) -> str:
    """Text of a message. Parts are joined by newlines, so one part is the same as a string."""
    if type(value) is str:
        return value
    if type(value) is not list or not value:
        raise _wrong("must be a string or a list of text parts")
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if type(part) is dict else None
        if kind != "text":
            raise _wrong(f"part {number} must be of type 'text'; other types are not supported")
        if type(part.get("text")) is not str:
            raise _wrong(f"part {number} must have a string as its 'text'")
        texts.append(part["text"])
    return "\n".join(texts)


Prompts = Annotated[
    list[Prompt],
    PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Stop = Annotated[list[str], PlainValidator(_stop, json_schema_input_type=str | list[str])]
Content = Annotated[
    str, PlainValidator(_content, json_schema_input_type=str | list[dict[str, Any]])
]

# ---------------------------------------------------------------- bodies

_NOTHING: tuple[Any, ...] = ()

_SAMPLING_TO_COME: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": _NOTHING,
    "bad_words": ([],),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "kv_transfer_params": _NOTHING,
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": _NOTHING,
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": _NOTHING,
    "repetition_detection": _NOTHING,
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": _NOTHING,
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": _NOTHING,
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}


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
                raise PydanticCustomError(
                    "unsupported",
                    "not supported by this server; it may only be {allowed}",
                    {"field": name, "allowed": allowed},
                )
        return given


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """What both endpoints take."""

    model: str | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT64_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT64_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    seed: Int64 | None = None
    stop: Stop = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    priority: Int64 = 0
    deadline_ms: Annotated[int, Field(ge=1, le=_INT64_MAX)] | None = None
    cache_salt: Annotated[str, Field(pattern=r"^[^@/\\\x00]{1,128}$")] | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "value", "only allowed together with `stream`: true", {"field": "stream_options"}
            )
        return self

    @property
    def asked_tokens(self) -> int | None:
        """Tokens to generate at most; None leaves it to the model."""
        return self.max_completion_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk of a stream has the usage."""
        return self.wants_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    unsupported = {
        **_SAMPLING_TO_COME,
        "add_special_tokens": (True,),
        "logprobs": (False,),
        "prompt_embeds": _NOTHING,
        "suffix": ("",),
    }

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=_INT64_MAX)] = 16
    echo: bool = False

    @model_validator(mode="after")
    def _no_tokens_only_with_echo(self) -> CompletionBody:
        if self.asked_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "value",
                "must be at least 1; 0 is allowed with `echo` only",
                {"field": "max_tokens"},
            )
        return self

    @property
    def asked_tokens(self) -> int | None:
        """Tokens to generate at most."""
        return self.max_completion_tokens or self.max_tokens


class Message(Body):
    """One message of a chat."""

    unsupported = {
        "audio": _NOTHING,
        "function_call": _NOTHING,
        "reasoning": ("",),
        "reasoning_content": ("",),
        "refusal": ("",),
        "tool_calls": ([],),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None
    tool_call_id: str | None = None

    def for_template(self) -> dict[str, str]:
        """Write it as chat templates know it; to them a developer's message is the system's."""
        role = "system" if self.role == "developer" else self.role
        return {**self.model_dump(exclude_none=True), "role": role}


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    unsupported = {
        **_SAMPLING_TO_COME,
        "add_special_tokens": (False,),
        "audio": _NOTHING,
        "chat_template": _NOTHING,
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "logprobs": (False,),
        "modalities": (["text"],),
        "reasoning_effort": _NOTHING,
        "tool_choice": ("none",),
        "tools": _NOTHING,
        "top_logprobs": (0,),
        "verbosity": _NOTHING,
        "web_search_options": _NOTHING,
    }

    messages: list[Message] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1, le=_INT64_MAX)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _new_message_or_the_last_one(self) -> ChatBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "value",
                "only allowed together with `add_generation_prompt`: false",
                {"field": "continue_final_message"},
            )
        return self

    @property
    def asked_tokens(self) -> int | None:
        """Tokens to generate at most; None is as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens
