"""How the text of a chat is read: what of it is reasoning, what calls, what content.

A value, stored with the request, so that any gateway reads it alike.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from gateway.tools.parsers import PARSERS, ForcedCallsParser, NamedCallParser, make_parser
from gateway.tools.parts import Parser
from gateway.tools.reasoning import CLOSING, OPENING, ReasoningCounter, ReasoningParser

FORCED = "forced"


@dataclass(frozen=True, slots=True)
class Speech:
    """How one answer's text is read."""

    tool_parser: str | None = None  # a family, or FORCED
    named_call: str | None = None  # the text is this function's arguments
    parallel_calls: bool = True
    reasoning: Literal["none", "closed", "open"] = "none"  # open: the prompt has the opening mark
    shows_reasoning: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that mean something to the parser, even those of special tokens."""
        marks: tuple[str, ...] = ()
        if self.tool_parser is not None and self.tool_parser in PARSERS:
            marks += PARSERS[self.tool_parser].marks
        if self.reasoning != "none":
            marks += (OPENING, CLOSING)
        return marks

    def parser(self) -> Parser | None:
        """Who reads it; None if all is content."""
        calls: Parser | None = None
        if self.named_call is not None:
            calls = NamedCallParser(self.named_call)
        elif self.tool_parser == FORCED:
            calls = ForcedCallsParser()
        elif self.tool_parser is not None:
            calls = make_parser(self.tool_parser)
        if self.reasoning == "none":
            return calls
        return ReasoningParser(calls, is_open=self.reasoning == "open")

    def reasoning_counter(self) -> ReasoningCounter | None:
        """Who counts the tokens of the reasoning; None if there is none."""
        if self.reasoning == "none":
            return None
        return ReasoningCounter(is_open=self.reasoning == "open")

    def call_id(self, answer_id: str, choice: int, number: int) -> str:
        """Id of a call, the same wherever it is asked for. Mistral's have nine characters."""
        digest = hashlib.sha256(f"{answer_id}/{choice}/{number}".encode()).hexdigest()
        return digest[:9] if self.tool_parser == "mistral" else f"call_{digest[:24]}"
