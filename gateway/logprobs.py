"""Log-probabilities in the shapes that clients know. Pure.

A token that is no part of the text (the end of the generation, say) has a name and no bytes, so the
bytes of all tokens joined are the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from gateway.detokenizer import TextOptions
from gateway.vocabulary import Vocabulary
from wire.logprobs import LogprobRecord


class TokenNames:
    """Tokens as answers spell them."""

    def __init__(self, vocabulary: Vocabulary, options: TextOptions, *, as_ids: bool) -> None:
        self._vocabulary = vocabulary
        self._as_ids = as_ids
        special = vocabulary.special_ids - options.shown_ids
        silent = set(special) if options.skip_special_tokens else set()
        self._silent = silent | (set() if options.include_stop else set(options.terminal_ids))

    def piece(self, token_id: int) -> bytes:
        """What a token adds to the text."""
        return b"" if token_id in self._silent else self._vocabulary.piece(token_id)

    def text(self, token_id: int) -> str:
        """Spell a token, with U+FFFD for a character that it has only in part."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._vocabulary.piece(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        """Spell a token so that no other one is spelled the same; its bytes, if it is no text."""
        if self._as_ids:
            return f"token_id:{token_id}"
        piece = self._vocabulary.piece(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class TextOffsets:
    """Where each token of a text begins, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def next(self, piece: bytes) -> int:
        """Add a token; where it begins."""
        begin = self._length
        self._length += len(self._decoder.decode(piece))
        return begin


def chat_logprobs(records: Iterable[LogprobRecord], names: TokenNames) -> dict[str, Any]:
    """As `POST /v1/chat/completions` has them."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        piece = names.piece(token_id)
        return {"token": names.text(token_id), "logprob": logprob, "bytes": list(piece)}

    content = [
        {
            **entry(record.token_id, record.logprob),
            "top_logprobs": [entry(*one) for one in record.top],
        }
        for record in records
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    records: Sequence[LogprobRecord], names: TokenNames, offsets: TextOffsets
) -> dict[str, Any]:
    """As `POST /v1/completions` has them: four lists, a place a token.

    The token itself is among the alternatives, whether it is one of the most likely or not.
    """
    return {
        "text_offset": [offsets.next(names.piece(record.token_id)) for record in records],
        "token_logprobs": [record.logprob for record in records],
        "tokens": [names.key(record.token_id) for record in records],
        "top_logprobs": [
            {
                names.key(record.token_id): record.logprob,
                **{names.key(token_id): logprob for token_id, logprob in record.top},
            }
            for record in records
        ],
    }


def echo_logprobs(
    first_id: int,
    records: Sequence[LogprobRecord],
    num_top: int,
    names: TokenNames,
    offsets: TextOffsets,
) -> dict[str, Any]:
    """Of a prompt that is part of a completion's text. Of its first token there are none."""
    first = offsets.next(names.piece(first_id))
    cut = [LogprobRecord(r.token_id, r.logprob, r.rank, r.top[:num_top]) for r in records]
    others = completion_logprobs(cut, names, offsets)
    heads = {
        "text_offset": first,
        "token_logprobs": None,
        "tokens": names.key(first_id),
        "top_logprobs": None,
    }
    return {name: [head, *others[name]] for name, head in heads.items()}


def prompt_logprobs(
    records: Sequence[LogprobRecord], names: TokenNames
) -> list[dict[str, Any] | None]:
    """As vLLM's `prompt_logprobs`: of each token of a prompt but the first, by token id."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": names.text(token_id)}

    return [
        None,
        *(
            {
                **{
                    str(token_id): entry(token_id, logprob, rank)
                    for rank, (token_id, logprob) in enumerate(record.top, start=1)
                },
                str(record.token_id): entry(record.token_id, record.logprob, record.rank),
            }
            for record in records
        ),
    ]
