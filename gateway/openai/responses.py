"""The body of `POST /v1/responses`, and the chat that it means.

Nothing is stored between two responses, so what refers to an earlier one is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from gateway.errors import ApiError
from gateway.openai.body import Body, wrong
from gateway.openai.chat import ChatBody, Message
from gateway.openai.fields import INT64_MAX, ItemText
from gateway.openai.generation import NOTHING, UNSUPPORTED, NumLogprobs, SamplingBody
from gateway.openai.structured import JsonSchema, NamedSchema, ResponseFormat
from gateway.openai.tools import (
    MAX_TOOLS,
    Arguments,
    Function,
    FunctionName,
    Name,
    NamedChoice,
    Tool,
    ToolChoice,
)

MAX_PAIRS = 16  # of metadata
LOGPROBS = "message.output_text.logprobs"

_STATEFUL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": NOTHING,
    "previous_response_id": NOTHING,
    "store": (False,),
}
"""What would need a store, with the values that ask for nothing."""

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""Fields of a chat, as a response calls them."""

_NEEDS: dict[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputItem(Body):
    """One thing that was said, called or found out before."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: ItemText | None = None
    call_id: Annotated[str, Field(min_length=1)] | None = None
    name: Annotated[str, Field(min_length=1)] | None = None
    arguments: Arguments | None = None
    output: ItemText | None = None
    summary: ItemText | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> InputItem:
        for name in _NEEDS[self.type]:
            if getattr(self, name) is None:
                raise wrong(f"is required in an item of type {self.type}", name)
        return self


def _items(value: Any) -> Any:
    """Read a text as what a user says."""
    if type(value) not in (str, list) or not value:
        raise wrong("must be a text or a list of items, and not empty")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Input = Annotated[
    list[InputItem], BeforeValidator(_items, json_schema_input_type=str | list[InputItem])
]


class TextFormat(Body):
    """Any text, any JSON object, or JSON that a schema allows."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    given: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _a_schema_where_one_is_meant(self) -> TextFormat:
        for name, value in (("name", self.name), ("schema", self.given)):
            if self.type == "json_schema" and value is None:
                raise wrong("is required with `type`: json_schema", name)
        return self

    def for_chat(self) -> ResponseFormat:
        """Say the same as a chat does."""
        schema = None
        if self.type == "json_schema":
            schema = NamedSchema.model_construct(name=self.name, given=self.given)
        return ResponseFormat.model_construct(type=self.type, json_schema=schema)


class TextOptions(Body):
    """What the text is to look like."""

    unsupported: ClassVar = {"verbosity": ("medium",)}

    format: TextFormat = Field(default_factory=TextFormat)


class Reasoning(Body):
    """How much is thought before the answer."""

    unsupported: ClassVar = {"generate_summary": NOTHING, "summary": NOTHING}

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class FunctionTool(Function):
    """A function, which is the only kind of tool."""

    type: Literal["function"]


class FunctionChoice(Body):
    """The model has to call this function."""

    type: Literal["function"]
    name: Name


class ResponseStreamOptions(Body):
    """Nothing can be chosen: this server pads no events."""

    unsupported: ClassVar = {"include_obfuscation": (False,)}


class ResponsesBody(SamplingBody):
    """`POST /v1/responses`."""

    unsupported: ClassVar = {
        **UNSUPPORTED,
        "context_management": ([],),
        "max_tool_calls": NOTHING,
        "prompt": NOTHING,
        "truncation": ("disabled",),
    }

    input: Input
    metadata: dict[str, str] = Field(default_factory=dict, max_length=MAX_PAIRS)
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool = True
    include: list[Literal["message.output_text.logprobs"]] = Field(default_factory=list)
    top_logprobs: NumLogprobs = 0
    stream_options: ResponseStreamOptions | None = None
    service_tier: Literal["auto", "default"] = "default"
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_needs_a_store(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name, neutral in _STATEFUL.items():
                if values.get(name) not in (None, *neutral) or type(values.get(name)) is int:
                    raise wrong(
                        "this server stores no responses; give all that was said as `input`", name
                    )
        return values

    @model_validator(mode="after")
    def _a_chat_can_be_made_of_it(self) -> ResponsesBody:
        if self.stream_options is not None and not self.stream:
            raise wrong("only allowed together with `stream`: true", "stream_options")
        chat = self.for_chat()
        chat.check_tools()
        chat.check_shape()
        if chat.logprobs and chat.chooses_tools:
            raise wrong("no log-probabilities together with `tools`", "include")
        return self

    def for_chat(self) -> ChatBody:
        """Ask the same of a chat."""
        choice: ToolChoice | None = None
        if isinstance(self.tool_choice, FunctionChoice):
            function = FunctionName(name=self.tool_choice.name)
            choice = NamedChoice(type="function", function=function)
        else:
            choice = self.tool_choice
        tools = [Tool.model_construct(type="function", function=tool) for tool in self.tools]
        return ChatBody.model_construct(
            **{name: getattr(self, name) for name in SamplingBody.model_fields},
            messages=[Message.model_validate(message) for message in self._messages()],
            max_completion_tokens=self.max_output_tokens,
            response_format=self.text.format.for_chat(),
            reasoning_effort=self.reasoning.effort,
            tools=tools or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            logprobs=bool(self.include or self.top_logprobs),
            top_logprobs=self.top_logprobs,
        )

    def echo(self) -> dict[str, Any]:
        """What the answer repeats of this."""
        shown = self.text.format.model_dump(by_alias=True, exclude_none=True)
        choice = self.tool_choice
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "text": {"format": shown},
            "tool_choice": choice.model_dump() if isinstance(choice, Body) else choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools],
            "top_logprobs": self.top_logprobs,
            "truncation": "disabled",
            "user": self.user,
        }

    def _messages(self) -> list[dict[str, Any]]:
        """What was said, as a chat has it: what an assistant did in one go is one message."""
        given = self.instructions
        messages: list[dict[str, Any]] = []
        if given is not None:
            messages.append({"role": "system", "content": given})
        for item in self.input:
            if item.type == "function_call_output":
                output = {"tool_call_id": item.call_id, "content": item.output}
                messages.append({"role": "tool", **output})
            elif item.type == "message" and item.role != "assistant":
                messages.append({"role": item.role, "content": item.content})
            else:
                _add_to_turn(messages, item)
        for message in messages:
            if "tool_calls" not in message:
                message.setdefault("content", "")
        return messages


def _add_to_turn(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Put what an assistant thought, said or called where its turn is, or begin one."""
    turn = messages[-1] if messages else {}
    is_new = turn.get("role") != "assistant" or (
        "content" in turn or "tool_calls" in turn
        if item.type == "message"
        else item.type == "reasoning" and len(turn) > 1
    )
    if is_new:
        turn = {"role": "assistant"}
        messages.append(turn)
    if item.type == "message":
        turn["content"] = item.content
    elif item.type == "reasoning":
        turn["reasoning"] = item.content or item.summary or ""
    else:
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})


def in_words_of_responses(error: ApiError) -> ApiError:
    """Say of a response what was said of the chat that it means."""
    for theirs, ours in _NAMES.items():
        if error.param is not None and (error.param + ".").startswith(theirs + "."):
            param = ours + error.param.removeprefix(theirs)
            message = error.message.replace(error.param, param, 1)
            return ApiError(error.status, message, kind=error.kind, param=param, code=error.code)
    return error
