"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from gateway.openai.body import Body, wrong
from gateway.openai.fields import INT64_MAX, Content
from gateway.openai.generation import NOTHING, UNSUPPORTED, GenerationBody, NumLogprobs
from gateway.openai.tools import MAX_TOOLS, NamedChoice, Tool, ToolCall, ToolChoice


class Message(Body):
    """One message of a chat."""

    unsupported: ClassVar = {
        "audio": NOTHING,
        "function_call": NOTHING,
        "refusal": ("",),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list)
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _says_or_calls_something(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise wrong("only an assistant calls tools", "tool_calls")
        if self.content is None and not self.tool_calls:
            raise wrong("is required", "content")
        return self

    def for_template(self) -> dict[str, Any]:
        """Write it as chat templates know it; to them a developer's message is the system's."""
        written = self.model_dump(exclude_none=True)
        if self.role == "developer":
            written["role"] = "system"
        if not self.tool_calls:
            del written["tool_calls"]
        if self.reasoning is not None:
            written.setdefault("reasoning_content", self.reasoning)
        return {**written, "content": self.content or ""}


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
        "mm_processor_kwargs": ({},),
        "modalities": (["text"],),
        "verbosity": NOTHING,
        "web_search_options": NOTHING,
    }

    messages: list[Message] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    tools: Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
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

    @model_validator(mode="after")
    def _a_choice_needs_tools(self) -> ChatBody:
        self.check_tools()
        return self

    def check_tools(self) -> None:
        """Refuse tools and a choice that do not go together. Raises PydanticCustomError."""
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise wrong("two functions have one name", "tools")
        if isinstance(self.tool_choice, NamedChoice):
            if self.tool_choice.function.name not in names:
                raise wrong("names a function that is none of `tools`", "tool_choice")
        elif self.tool_choice in ("auto", "required") and self.tools is None:
            raise wrong("only allowed together with `tools`", "tool_choice")
        if self.chooses_tools and self.has_shape:
            raise wrong(
                "not together with structured output, unless `tool_choice` is none", "tools"
            )

    @property
    def chooses_tools(self) -> bool:
        """Whether tools may be called, or must be."""
        return self.tools is not None and self.tool_choice != "none"

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens wanted with each output token; None if no log-probabilities are."""
        return self.top_logprobs if self.logprobs else None

    @property
    def asked_tokens(self) -> int | None:
        """Tokens to generate at most; None is as many as there is room for."""
        return self.max_completion_tokens or self.max_tokens
