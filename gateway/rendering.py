"""How output tokens become the answer to one HTTP request: all that is needed for it, as a value.

It is stored beside the request, so that any gateway can give the rest of an answer. It holds no
prompt, unless the answer shows it, or instructions of a response. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from gateway.detokenizer import TextOptions
from gateway.sequences import Reading
from gateway.tools.speech import Speech
from gateway.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Rendering:
    """Choices are numbered through all prompts, `n` for each."""

    endpoint: Literal["completion", "chat", "response"]
    model: str
    created: int  # unix time in seconds
    num_prompt_tokens: list[int]  # of each prompt
    n: int = 1
    text: TextOptions = field(default_factory=TextOptions)
    has_usage: bool = False
    has_running_usage: bool = False
    prompt_token_ids: list[list[int]] | None = None  # if the answer has token ids
    echoes: list[str] | None = None  # texts of the prompts, to be put before the output
    num_logprobs: int | None = None  # most likely tokens to be shown with each token, if any
    num_prompt_logprobs: int | None = None  # that are known of each token of the prompt
    shows_prompt_logprobs: bool = False  # by themselves, not only as part of the echo
    first_token_ids: list[int] | None = None  # of the prompts, if an echo shows log-probabilities
    tokens_as_ids: bool = False  # in log-probabilities
    speech: Speech = field(default_factory=Speech)  # how the text of a chat is read
    echo: dict[str, Any] = field(default_factory=dict)  # what a response repeats of its request

    @property
    def num_choices(self) -> int:
        """Sequences to generate."""
        return len(self.num_prompt_tokens) * self.n

    def as_json(self) -> str:
        """Write it down."""
        return _ADAPTER.dump_json(self).decode()


_ADAPTER = TypeAdapter(Rendering)


def rendering_from(text: str) -> Rendering | None:
    """Read what `as_json` wrote; None if it is nothing that this version knows."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError:
        return None


def reading_of(rendering: Rendering, vocabulary: Vocabulary, idle_s: float) -> Reading:
    """How each sequence of the answer is read."""
    return Reading(
        rendering.text,
        vocabulary,
        idle_s,
        rendering.num_logprobs,
        rendering.num_prompt_logprobs,
    )
