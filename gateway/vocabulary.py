"""What each token contributes to the text, as bytes.

Built once from a tokenizer, then plain data. It exists because a token is not a piece of text: it
may be half a character, and its leading space may depend on what stands before it. Bytes can be
joined without looking back, so that text appears at a cost that does not grow with its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every token id."""

    pieces: Sequence[bytes]
    special_ids: frozenset[int]
    strips_first_space: bool  # decoding drops one space at the very beginning of a text
    replaces_each_byte: bool  # U+FFFD for each byte that is no text; else for each broken character

    def piece(self, token_id: int) -> bytes:
        """Bytes of a token; none for an id that the model has and the tokenizer has not."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    def special_ids_of(self, marks: Sequence[str]) -> frozenset[int]:
        """Special tokens that are spelled like one of these."""
        spelled = {mark.encode() for mark in marks}
        return frozenset(one for one in self.special_ids if self.piece(one) in spelled)

    @property
    def longest_piece(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.pieces), default=1) or 1


def read_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Take the vocabulary out of a tokenizer, whatever decoder it has.

    - A `ByteLevel` decoder maps each character of a token to one byte.
    - With `ByteFallback`, a token like `<0xE2>` is one byte.
    - Any other token is what `decode` adds when the token stands behind another one.
    """
    decoders = set(_decoder_types(tokenizer))
    special_ids = frozenset(
        token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    )
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    ids = range(max(tokens, default=-1) + 1)
    if "ByteLevel" in decoders:
        pieces = [_byte_level_piece(tokens.get(token_id, "")) for token_id in ids]
        return Vocabulary(pieces, special_ids, False, False)
    has_byte_tokens = "ByteFallback" in decoders
    pieces = list(_pieces_behind(tokenizer, _anchor(tokenizer, tokens), ids))
    if has_byte_tokens:
        for token_id, token in tokens.items():
            if match := _BYTE_TOKEN.fullmatch(token):
                pieces[token_id] = bytes.fromhex(match[1])
    return Vocabulary(pieces, special_ids, _strips_first_space(tokenizer, pieces), has_byte_tokens)


def _decoder_types(tokenizer: Tokenizer) -> Iterable[str]:
    if tokenizer.decoder is None:
        return
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    waiting = [state]
    while waiting:
        decoder = waiting.pop()
        yield decoder["type"]
        waiting += decoder.get("decoders", [])


def _byte_alphabet() -> dict[str, int]:
    """Characters that stand for bytes in byte-level tokens: printable ones for themselves.

    The others got the code points from 256 on, in order (GPT-2's `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _byte_level_piece(token: str) -> bytes:
    """Bytes of a byte-level token; one with any other character stands for itself."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _anchor(tokenizer: Tokenizer, tokens: dict[int, str]) -> int:
    """Find a token of plain letters, to look at others behind it."""
    for token_id in sorted(tokens):
        if tokenizer.decode([token_id], skip_special_tokens=True).strip().isalpha():
            return token_id
    raise ValueError("the tokenizer has no token of plain letters")


def _pieces_behind(tokenizer: Tokenizer, anchor: int, ids: Iterable[int]) -> Iterable[bytes]:
    start = len(tokenizer.decode([anchor], skip_special_tokens=False))
    for token_id in ids:
        yield tokenizer.decode([anchor, token_id], skip_special_tokens=False)[start:].encode()


def _strips_first_space(tokenizer: Tokenizer, pieces: Sequence[bytes]) -> bool:
    for token_id, piece in enumerate(pieces):
        if piece.startswith(b" ") and piece.strip().isalpha():
            return not tokenizer.decode([token_id], skip_special_tokens=False).startswith(" ")
    return False
