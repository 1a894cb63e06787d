"""One message of the assistant: its text as content, reasoning and calls of tools. Pure.

Whole or in deltas, it says the same: the deltas of a stream, joined, are the whole message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.sequences import SequenceOutput
from gateway.tools import CallArguments, CallStart, Content, Part, Reasoning
from gateway.tools.parts import joined
from gateway.tools.speech import Speech


class MessageWriter:
    """Writes the message of one choice, either by deltas or as a whole."""

    def __init__(self, speech: Speech, answer_id: str, choice: int) -> None:
        self._speech = speech
        self._answer_id = answer_id
        self._choice = choice
        self._parser = speech.parser()
        self._num_started = 0
        self.num_calls = 0  # so far, that are shown

    def delta(self, output: SequenceOutput) -> dict[str, Any]:
        """What is new of it."""
        if self._parser is None:
            return {"content": output.text}
        parts = self._parser.push(output.text)
        if output.finish_reason is not None:
            parts += self._parser.finish()
        delta: dict[str, Any] = self._texts(parts)
        if calls := self._calls(parts):
            delta["tool_calls"] = calls
        return delta or {"content": ""}

    def whole(self, text: str) -> dict[str, Any]:
        """All of it at once."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._parser is None:
            return message
        parts = [*self._parser.push(text), *self._parser.finish()]
        texts, calls = self._texts(parts), self._calls(parts)
        message |= {"content": None if calls else "", **texts}
        if calls:
            names = ("id", "type", "function")
            message["tool_calls"] = [{name: call[name] for name in names} for call in calls]
        return message

    def _texts(self, parts: Sequence[Part]) -> dict[str, str]:
        """Content and reasoning; the latter under the names of vLLM, the new one and the old."""
        content = "".join(part.text for part in parts if isinstance(part, Content))
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        texts = {"content": content} if content else {}
        if reasoning and self._speech.shows_reasoning:
            texts |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return texts

    def _calls(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        """Calls that begin, and arguments of the one before, as `tool_calls` has them."""
        calls: list[dict[str, Any]] = []
        for part in joined(parts):
            match part:
                case CallStart(name):
                    self._num_started += 1
                    if self._is_shown():
                        self.num_calls += 1
                        calls.append(self._start(name))
                case CallArguments(text) if self._is_shown():
                    index = self.num_calls - 1
                    if not calls or calls[-1]["index"] != index:
                        calls.append({"index": index, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
                case _:
                    pass
        return calls

    def _is_shown(self) -> bool:
        """Whether the call that began last is one too many."""
        return self._speech.parallel_calls or self._num_started == 1

    def _start(self, name: str) -> dict[str, Any]:
        index = self.num_calls - 1
        return {
            "index": index,
            "id": self._speech.call_id(self._answer_id, self._choice, index),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
