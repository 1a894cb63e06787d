"""What a model says to itself, apart from its answer: `<think>…</think>` at the beginning."""

from __future__ import annotations

from gateway.tools.parts import Content, Parser, Part, Reasoning, split_before

OPENING, CLOSING = "<think>", "</think>"


class ReasoningParser:
    """Hands what follows the reasoning to another parser, or out as content."""

    def __init__(self, rest: Parser | None, *, is_open: bool) -> None:
        """`is_open` if the prompt has the opening mark already."""
        self._rest = rest
        self._held = ""
        self._is_open = is_open
        self._is_undecided = not is_open  # nothing but space so far, or part of the opening mark
        self._is_first = True  # nothing was said since a mark: line breaks do not count

    def push(self, text: str) -> list[Part]:
        """Read more text."""
        self._held += text
        if self._is_undecided:
            start = self._held.lstrip()
            if OPENING.startswith(start) and start != OPENING:
                return []
            self._is_undecided = False
            if start.startswith(OPENING):
                self._is_open, self._held = True, start.removeprefix(OPENING)
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
