"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from gateway.openai.body import wrong
from gateway.openai.fields import INT64_MAX, Prompts
from gateway.openai.generation import NOTHING, UNSUPPORTED, GenerationBody


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    unsupported: ClassVar = {
        **UNSUPPORTED,
        "logprobs": (False,),
        "prompt_embeds": NOTHING,
        "suffix": ("",),
    }

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] = 16
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _no_tokens_only_with_echo(self) -> CompletionBody:
        if self.asked_tokens == 0 and not self.echo:
            raise wrong("must be at least 1; 0 is allowed with `echo` only", "max_tokens")
        return self

    @property
    def asked_tokens(self) -> int | None:
        """Tokens to generate at most."""
        return self.max_completion_tokens or self.max_tokens
