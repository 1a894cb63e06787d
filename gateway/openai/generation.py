"""What every endpoint that generates takes: sampling, lengths, ends, and the stream."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gateway.openai.body import Body, ModelBody, wrong
from gateway.openai.fields import (
    INT64_MAX,
    MAX_TOKEN_IDS,
    BadWords,
    Int64,
    LogitBias,
    Stop,
    TokenId,
)
from gateway.openai.structured import ResponseFormat, StructuredOutputs

MAX_CHOICES = 128
MAX_LOGPROBS = 20

NOTHING: tuple[Any, ...] = ()

NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "guided_choice": NOTHING,
    "guided_grammar": NOTHING,
    "guided_json": NOTHING,
    "guided_regex": NOTHING,
    "kv_transfer_params": NOTHING,
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": NOTHING,
    "repetition_detection": NOTHING,
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
}
"""Fields that no endpoint honours, with the values that ask for nothing."""


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(ModelBody):
    """How tokens are chosen and when to stop: what all endpoints take that generate."""

    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] = 0
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logit_bias: LogitBias = Field(default_factory=dict)
    bad_words: BadWords = Field(default_factory=list)
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    seed: Int64 | None = None
    stop: Stop = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MAX_TOKEN_IDS)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    stream: bool = False
    priority: Int64 = 0
    deadline_ms: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    cache_salt: Annotated[str, Field(pattern=r"^[^@/\\\x00]{1,128}$")] | None = None
    user: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    request_id: str | None = None
    session_id: str | None = None


class GenerationBody(SamplingBody):
    """What `POST /v1/completions` and `POST /v1/chat/completions` take."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream_options: StreamOptions | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise wrong("only allowed together with `stream`: true", "stream_options")
        return self

    @model_validator(mode="after")
    def _prompt_logprobs_come_at_once(self) -> GenerationBody:
        if self.prompt_logprobs is not None and self.stream:
            raise wrong("not available in a stream", "prompt_logprobs")
        return self

    @model_validator(mode="after")
    def _one_shape_that_ends(self) -> GenerationBody:
        self.check_shape()
        return self

    def check_shape(self) -> None:
        """Refuse more than one form, and one that never ends. Raises PydanticCustomError."""
        if self.has_shape and self.ignore_eos:
            raise wrong("not together with structured output, which ends by itself", "ignore_eos")
        response = self.response_format
        if self.structured_outputs is not None and response and response.type != "text":
            raise wrong("not together with `response_format`", "structured_outputs")

    @property
    def has_shape(self) -> bool:
        """Whether the output must be of a certain form."""
        response = self.response_format
        has_format = response is not None and response.type != "text"
        return has_format or self.structured_outputs is not None

    @property
    def asked_tokens(self) -> int | None:
        """Tokens to generate at most; None leaves it to the model."""
        return self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens wanted with each output token; None if no log-probabilities are."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for each token of the prompt."""
        return self.prompt_logprobs

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
