"""The answer to one HTTP request, and what all answers have in common. Pure.

What an answer says is a function of its id, its rendering and the outputs, so that two gateways say
the same. In a stream it comes as groups of events: a client has all of a group, or none.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gateway.errors import ApiError
from gateway.logprobs import TextOffsets, TokenNames
from gateway.rendering import Rendering
from gateway.sequences import SequenceOutput
from gateway.tools.reasoning import ReasoningCounter
from gateway.vocabulary import Vocabulary
from wire.logprobs import LogprobRecord

Events = list[dict[str, Any]]


@dataclass(slots=True)
class Choice:
    """All that came for one sequence."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[LogprobRecord] = field(default_factory=list)
    prompt_logprobs: Sequence[LogprobRecord] = ()
    offsets: TextOffsets = field(default_factory=TextOffsets)
    reasoning: ReasoningCounter | None = None  # if there may be any

    def add(self, output: SequenceOutput, names: TokenNames, *, keep: bool) -> None:
        """Take an output in; text and tokens only if they are wanted at the end."""
        if self.reasoning is not None:
            self.reasoning.push(map(names.piece, output.token_ids))
        if keep:
            self.texts.append(output.text)
            self.token_ids += output.token_ids
            self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.started is not None:
            self.num_cached_tokens = output.started.num_cached_tokens
        self.num_tokens = output.num_output_tokens
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason


class Answer(ABC):
    """The answer to one request, as groups of events or as one body."""

    id_prefix: ClassVar[str]
    end_mark: ClassVar[str | None] = "[DONE]"
    """What a stream ends with, if with anything."""

    has_opening = True
    """Whether a stream has a group for each choice before the first output."""

    def __init__(self, req_id: str, rendering: Rendering, vocabulary: Vocabulary) -> None:
        self.answer_id = f"{self.id_prefix}{req_id}"
        self._rendering = rendering
        self._names = TokenNames(vocabulary, rendering.text, as_ids=rendering.tokens_as_ids)
        self._choices = [
            Choice(index, reasoning=rendering.speech.reasoning_counter())
            for index in range(rendering.num_choices)
        ]

    @abstractmethod
    def add(self, output: SequenceOutput) -> None:
        """Take an output in that is not streamed."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """All of it, with the usage."""

    @abstractmethod
    def opening(self) -> list[Events]:
        """Groups before the first output, one for each choice, if `has_opening`."""

    @abstractmethod
    def group(self, output: SequenceOutput) -> Events:
        """Turn an output into events of the stream."""

    @abstractmethod
    def closing(self) -> list[Events]:
        """Groups after the last output."""

    def failure(self, error: ApiError) -> Events:
        """Say that nothing more will come, once the stream has begun."""
        return [error.body]

    def _take(self, output: SequenceOutput, *, keep: bool) -> Choice:
        """Take an output in; its choice."""
        choice = self._choices[output.index]
        choice.add(output, self._names, keep=keep)
        return choice

    # ------------------------------------------------------------ tokens so far

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(self._rendering.num_prompt_tokens)

    @property
    def _num_output_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def _num_cached_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(choice.num_cached_tokens for choice in self._choices[:: self._rendering.n])

    @property
    def _num_reasoning_tokens(self) -> int:
        return sum(choice.reasoning.num_tokens for choice in self._choices if choice.reasoning)


def request_id_in(answer_id: str) -> str:
    """Id of the first request of an answer, which is part of the answer's own."""
    return re.split("[-_]", answer_id)[-1]
