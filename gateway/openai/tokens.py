"""The bodies of `POST /tokenize` and `POST /detokenize`, which are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from gateway.openai.body import ModelBody, wrong
from gateway.openai.chat import Message
from gateway.openai.fields import TokenId
from gateway.openai.tools import MAX_TOOLS, Tool


class TokenizeBody(ModelBody):
    """`POST /tokenize`: a text, or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("either this or `messages` is needed", "prompt")
        return self


class DetokenizeBody(ModelBody):
    """`POST /detokenize`."""

    tokens: list[TokenId]
