"""How output tokens become the answer to one HTTP request: all that is needed for it, as a value.

It is stored beside the request, so that any gateway can give the rest of an answer. It holds no
prompt, unless the answer shows it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from gateway.detokenizer import TextOptions


@dataclass(frozen=True, slots=True)
class Rendering:
    """Choices are numbered through all prompts, `n` for each."""

    endpoint: Literal["completion", "chat"]
    model: str
    created: int  # unix time in seconds
    num_prompt_tokens: list[int]  # of each prompt
    n: int = 1
    text: TextOptions = field(default_factory=TextOptions)
    has_usage: bool = False
    has_running_usage: bool = False
    prompt_token_ids: list[list[int]] | None = None  # if the answer has token ids
    echoes: list[str] | None = None  # texts of the prompts, to be put before the output

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
