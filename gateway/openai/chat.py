"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from gateway.openai.body import Body, wrong
from gateway.openai.fields import INT64_MAX, Content
from gateway.openai.generation import NOTHING, UNSUPPORTED, GenerationBody, NumLogprobs


class Message(Body):
    """One message of a chat."""

    unsupported: ClassVar = {
        "audio": NOTHING,
        "function_call": NOTHING,
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

    unsupported: ClassVar = {
        **UNSUPPORTED,
        "add_special_tokens": (False,),
        "audio": NOTHING,
        "chat_template": NOTHING,
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "reasoning_effort": NOTHING,
        "tool_choice": ("none",),
        "tools": NOTHING,
        "verbosity": NOTHING,
        "web_search_options": NOTHING,
    }

    messages: list[Message] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _new_message_or_the_last_one(self) -> ChatBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong(
                "only allowed together with `add_generation_prompt`: false",
                "continue_final_message",
            )
        return self

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise wrong("only allowed together with `logprobs`: true", "top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens wanted with each output token; None if no log-probabilities are."""
        return self.top_logprobs if self.logprobs else None

    @property
    def asked_tokens(self) -> int | None:
        """Tokens to generate at most; None is as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens
