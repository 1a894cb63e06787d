"""What an output may be asked to look like: `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from gateway.openai.body import Body, wrong

MAX_GRAMMAR_LENGTH = 128 * 1024  # characters of a schema or an expression
MAX_SOURCE_LENGTH = 32 * 1024  # of a grammar: GBNF is translated while everybody waits
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES_OF_TEXT = 1024

JsonSchema = dict[str, Any]


class NamedSchema(Body):
    """A schema as `response_format` has it."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    given: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """Any text, any JSON object, or JSON that a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _a_schema_where_one_is_meant(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise wrong("is required with `type`: json_schema", "json_schema")
        return self


class StructuredOutputs(Body):
    """Exactly one of these."""

    unsupported: ClassVar = {
        "structural_tag": (),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
    }

    given_json: JsonSchema | str | None = Field(default=None, alias="json")
    regex: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_CHOICES_OF_TEXT),
        ]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_LENGTH)] | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        kinds = (self.given_json, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(kind is not None for kind in kinds) != 1:
            raise wrong("exactly one of json, regex, choice, grammar and json_object is needed")
        return self
