"""What a model says to itself, apart from its answer: `<think>…</think>` at the beginning."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from gateway.tools.parts import Content, Parser, Part, Reasoning, split_before

OPENING, CLOSING = "<think>", "</think>"


class ReasoningParser:
    """Hands what follows the reasoning to another parser, or out as content."""

    def __init__(self, rest: Parser | None, *, is_open: bool) -> None:
        """`is_open` if the prompt has the opening mark already."""
        self._rest = rest
        self._held = ""
        self._is_open = self.was_opened = is_open
        self._is_undecided = not is_open  # nothing but space so far, or part of the opening mark
        self._is_first = True  # nothing was said since a mark: line breaks do not count

    @property
    def is_undecided(self) -> bool:
        """Whether it is not known yet if this is reasoning."""
        return self._is_undecided

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._is_open

    def push(self, text: str) -> list[Part]:
        """Read more text."""
        self._held += text
        if self._is_undecided:
            start = self._held.lstrip()
            if OPENING.startswith(start) and start != OPENING:
                return []
            self._is_undecided = False
            if start.startswith(OPENING):
                self._is_open = self.was_opened = True
                self._held = start.removeprefix(OPENING)
        if not self._is_open:
            return self._push_rest()
        before, self._held, is_closed = split_before(self._held, CLOSING)
        parts: list[Part] = self._trimmed(before)
        if is_closed:
            self._is_open, self._is_first = False, True
            parts += self._push_rest()
        return parts

    def finish(self) -> list[Part]:
        """Give what was held back."""
        held, self._held = self._held, ""
        if self._is_open:
            return [Reasoning(held)] if held else []
        parts = self._answer(held)
        return parts + (self._rest.finish() if self._rest is not None else [])

    def _trimmed(self, text: str) -> list[Part]:
        if self._is_first:
            text = text.lstrip("\n")
        self._is_first = self._is_first and not text
        return [Reasoning(text)] if text else []

    def _push_rest(self) -> list[Part]:
        held, self._held = self._held, ""
        return self._answer(held)

    def _answer(self, text: str) -> list[Part]:
        if self._is_first:
            text = text.lstrip("\n")
        self._is_first = self._is_first and not text
        if not text:
            return []
        return [Content(text)] if self._rest is None else self._rest.push(text)


class ReasoningCounter:
    """Counts tokens up to the closing mark and with it; all, if it never comes."""

    def __init__(self, *, is_open: bool) -> None:
        self.num_tokens = 0
        self._num_pending = 0  # while it is not known what they are
        self._is_over = False
        self._reader = ReasoningParser(None, is_open=is_open)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: Iterable[bytes]) -> None:
        """Add what tokens add to the text, one by one."""
        for piece in pieces:
            if self._is_over:
                return
            self._reader.push(self._decoder.decode(piece))
            self._num_pending += 1
            if self._reader.is_undecided:
                continue
            self._is_over = not self._reader.is_reasoning
            if self._reader.was_opened:
                self.num_tokens += self._num_pending
            self._num_pending = 0
