"""Token ids to text, piece by piece, with stop strings. Pure.

Two promises. The pieces of text joined are one decode of all the tokens, cut at the first stop
string; a character or a stop string is never seen in part. And how tokens are grouped into calls
changes nothing, so a slow reader gets the same text as a fast one.

In a vocabulary with byte tokens there is one difference from a decode of everything at once: that
replaces a whole run of byte tokens if any byte in it is wrong, while text that was right before the
wrong byte stays right here.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from dataclasses import dataclass

from gateway.vocabulary import Vocabulary

_EACH_BYTE = "pagestream-replace-each-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How one sequence becomes text."""

    stop: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    terminal_ids: Set[int] = frozenset()  # end the generation, and are no part of its text
    continues: bool = False  # the text goes on from a text before it, so a first space is real
    shown_ids: Set[int] = frozenset()  # special, and part of the text all the same
    min_tokens: int = 0  # the text of so many tokens is no part of a stop string


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text, and the stop string that ended it if one did."""

    text: str
    num_tokens: int  # of those given, up to the end of a stop string
    stop: str | None = None


class Detokenizer:
    """The text of one sequence as it grows."""

    def __init__(self, vocabulary: Vocabulary, options: TextOptions | None = None) -> None:
        options = options or TextOptions()
        self._vocabulary = vocabulary
        self._special_ids: Set[int] = frozenset()
        if options.skip_special_tokens:
            self._special_ids = vocabulary.special_ids - options.shown_ids
        self._terminal_ids = frozenset() if options.include_stop else options.terminal_ids
        self._strip_space = vocabulary.strips_first_space and not options.continues
        errors = _EACH_BYTE if vocabulary.replaces_each_byte else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        self._stops = StopStrings(options.stop, options.include_stop)
        self._num_free = options.min_tokens  # tokens to come that no stop string is looked for in

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add tokens. After a delta with a `stop`, nothing may be added."""
        texts = []
        for count, token_id in enumerate(token_ids, start=1):
            text, stop = self._decoder.decode(self._bytes(token_id)), None
            if self._num_free:
                self._num_free -= 1
            else:
                text, stop = self._stops.push(text)
            texts.append(text)
            if stop is not None:
                return TextDelta("".join(texts), count, stop)
        return TextDelta("".join(texts), len(token_ids))

    def finish(self) -> TextDelta:
        """End the text: give out what was held back, unfinished characters as U+FFFD."""
        text, stop = self._stops.push(self._decoder.decode(b"", final=True))
        if stop is None:
            text += self._stops.flush()
        return TextDelta(text, 0, stop)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._special_ids or token_id in self._terminal_ids:
            return b""
        piece = self._vocabulary.piece(token_id)
        if self._strip_space and piece:
            self._strip_space = False
            return piece.removeprefix(b" ")
        return piece


def text_of(token_ids: Sequence[int], vocabulary: Vocabulary, *, skip_special: bool = False) -> str:
    """Decode tokens that are all there."""
    detokenizer = Detokenizer(vocabulary, TextOptions(skip_special_tokens=skip_special))
    return detokenizer.push(token_ids).text + detokenizer.finish().text


class StopStrings:
    """Watches a text for the strings that end it, and holds back what could be their beginning."""

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""  # given to nobody yet; a proper prefix of some stop string

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; get what can be given out, and the stop string that is complete, if any.

        The string that is complete first wins; of two that end together, the longer.
        """
        if not self._stop or not text:
            return text, None
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return text[: end if self._include_stop else start], stop
        keep = len(text) - self._num_held(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """End the text without a stop string: what is held back was none."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that a stop string could begin with."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
