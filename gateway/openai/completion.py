"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from gateway.openai.body import wrong
from gateway.openai.fields import INT64_MAX, Prompts
from gateway.openai.generation import NOTHING, UNSUPPORTED, GenerationBody, NumLogprobs


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    unsupported: ClassVar = {
        **UNSUPPORTED,
        "prompt_embeds": NOTHING,
        "suffix": ("",),
    }

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] = 16
    logprobs: NumLogprobs | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _no_tokens_only_with_echo(self) -> CompletionBody:
        if self.asked_tokens == 0 and not self.echo:
            raise wrong("must be at least 1; 0 is allowed with `echo` only", "max_tokens")
        return self

    @model_validator(mode="after")
    def _logprobs_of_an_echo_come_at_once(self) -> CompletionBody:
        if self.echo and self.logprobs is not None and self.stream:
            raise wrong("not available in a stream with `echo`", "logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens wanted with each output token; None if no log-probabilities are."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for each token of the prompt, which an echo shows as well."""
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)

    @property
    def asked_tokens(self) -> int | None:
        """Tokens to generate at most."""
        return self.max_completion_tokens or self.max_tokens
