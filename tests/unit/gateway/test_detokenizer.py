"""Bytes to text, piece by piece, on real tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.detokenizer import Detokenizer, StopStrings, TextOptions
from gateway.vocabulary import Vocabulary, read_vocabulary
from tests.fakes.tokenizers import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
METASPACE = metaspace_tokenizer()
VOCABULARIES = {id(t): read_vocabulary(t) for t in (BYTE_LEVEL, BYTE_FALLBACK, METASPACE)}

TEXTS = [
    "hello world",
    "  two spaces first, and a newline\n\n at the end \n",
    "spaces before punctuation : here , and there .",
    "👍🏽 skin tone, 👩‍💻 joined, 🇩🇪 flag",
    "你好,世界",
    "नमस्ते, é (combining)",
    "\ufffd a real replacement character \ufffd\ufffd and more",
    "def f(x):\n\treturn '😀'",
]


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return VOCABULARIES[id(tokenizer)]


def deltas(
    tokenizer: Tokenizer, ids: Sequence[int], options: TextOptions | None = None, size: int = 1
) -> list[str]:
    detokenizer = Detokenizer(vocabulary_of(tokenizer), options)
    texts = [detokenizer.push(ids[start : start + size]).text for start in range(0, len(ids), size)]
    return [*texts, detokenizer.finish().text]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Tokens that are one byte each."""
    vocabulary = vocabulary_of(tokenizer)
    single = {
        piece[0]: i for i, piece in reversed([*enumerate(vocabulary.pieces)]) if len(piece) == 1
    }
    if vocabulary.replaces_each_byte:
        single = {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    return [single[byte] for byte in data]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_joined_deltas_are_one_decode(tokenizer: Tokenizer, text: str, size: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    found = deltas(tokenizer, ids, size=size)
    assert "".join(found) == tokenizer.decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=40), st.integers(1, 5))
def test_any_byte_level_tokens_join_to_one_decode(ids: list[int], size: int) -> None:
    for skip in (True, False):
        found = deltas(BYTE_LEVEL, ids, TextOptions(skip_special_tokens=skip), size)
        assert "".join(found) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(max_size=4) | st.binary(min_size=1, max_size=4), max_size=8))
def test_any_text_and_broken_bytes_join_to_one_decode_with_byte_tokens(
    parts: list[str | bytes],
) -> None:
    ids: list[int] = []
    letter = BYTE_FALLBACK.token_to_id("x")
    for part in parts:  # a letter ends each run of byte tokens, which `decode` judges as a whole
        if isinstance(part, str):
            ids += BYTE_FALLBACK.encode(part, add_special_tokens=False).ids
        elif not _starts_with_text(part):
            ids += byte_ids(BYTE_FALLBACK, part)
        ids.append(letter)
    assert "".join(deltas(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids)


def _starts_with_text(data: bytes) -> bool:
    """Whether whole characters stand in a run of bytes that is not text as a whole."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return any(c != "\ufffd" for c in data.decode(errors="replace"))
    return False


def test_good_characters_before_a_broken_byte_stay_good() -> None:
    ids = byte_ids(BYTE_FALLBACK, "€".encode() + b"\x80")
    assert "".join(deltas(BYTE_FALLBACK, ids)) == "€\ufffd"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=12))
def test_metaspace_tokens_join_to_one_decode(ids: list[int]) -> None:
    assert "".join(deltas(METASPACE, ids)) == METASPACE.decode(ids)


def test_a_character_appears_whole_and_at_once() -> None:
    ids = byte_ids(BYTE_LEVEL, "a👍b".encode())
    assert deltas(BYTE_LEVEL, ids) == ["a", "", "", "", "👍", "b", ""]


def test_unfinished_bytes_appear_once_at_the_end() -> None:
    ids = byte_ids(BYTE_LEVEL, b"ok\xf0\x9f\x98")
    assert deltas(BYTE_LEVEL, ids) == ["o", "k", "", "", "", "\ufffd"]


def test_a_real_replacement_character_does_not_stall() -> None:
    ids = byte_ids(BYTE_LEVEL, "\ufffd\ufffdx".encode())
    assert deltas(BYTE_LEVEL, ids) == ["", "", "\ufffd", "", "", "\ufffd", "x", ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["bytes", "fallback"])
def test_garbage_bytes_do_not_stall(tokenizer: Tokenizer) -> None:
    found = deltas(tokenizer, byte_ids(tokenizer, b"\x80" * 50))
    assert found == ["\ufffd"] * 50 + [""]


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = BYTE_LEVEL.encode("hello<|im_end|> world<think>").ids
    assert "".join(deltas(BYTE_LEVEL, ids)) == "hello world<think>"
    shown = deltas(BYTE_LEVEL, ids, TextOptions(skip_special_tokens=False))
    assert "".join(shown) == "hello<|im_end|> world<think>"


def test_the_token_that_ends_a_generation_is_no_text_unless_asked_for() -> None:
    ids = BYTE_LEVEL.encode("hello<|im_end|>").ids
    end = frozenset({ids[-1]})
    hidden = TextOptions(skip_special_tokens=False, terminal_ids=end)
    shown = TextOptions(skip_special_tokens=False, terminal_ids=end, include_stop=True)
    assert "".join(deltas(BYTE_LEVEL, ids, hidden)) == "hello"
    assert "".join(deltas(BYTE_LEVEL, ids, shown)) == "hello<|im_end|>"


@pytest.mark.parametrize("tokenizer", [BYTE_FALLBACK, METASPACE], ids=["fallback", "metaspace"])
def test_a_continuation_keeps_its_first_space_and_an_answer_stands_alone(
    tokenizer: Tokenizer,
) -> None:
    ids = [tokenizer.token_to_id("▁hello"), tokenizer.token_to_id("▁world")]
    assert "".join(deltas(tokenizer, ids, TextOptions(continues=True))) == " hello world"
    assert "".join(deltas(tokenizer, ids)) == tokenizer.decode(ids) == "hello world"


def test_ids_beyond_the_tokenizer_are_no_text() -> None:
    size = BYTE_LEVEL.get_vocab_size()
    assert deltas(BYTE_LEVEL, [size, size + 100_000]) == ["", "", ""]


def test_a_token_costs_the_same_at_any_length() -> None:
    """Counts calls rather than time: the decoder sees each byte once."""
    seen = 0
    detokenizer = Detokenizer(vocabulary_of(BYTE_LEVEL))
    decode = detokenizer._decoder.decode

    def counting(data: bytes, final: bool = False) -> str:
        nonlocal seen
        seen += len(data)
        return decode(data, final)

    detokenizer._decoder.decode = counting
    ids = byte_ids(BYTE_LEVEL, b"\xf0\x9f" * 5000)
    for token_id in ids:
        detokenizer.push([token_id])
    assert seen == 10_000


# ---------------------------------------------------------------- stop strings


def run_stops(
    stop: Sequence[str], pieces: Sequence[str], *, include: bool = False
) -> tuple[list[str], str | None]:
    stops = StopStrings(stop, include)
    given_out = []
    for piece in pieces:
        text, found = stops.push(piece)
        given_out.append(text)
        if found is not None:
            return given_out, found
    return [*given_out, stops.flush()], None


@pytest.mark.parametrize(
    ("stop", "pieces", "expected", "found"),
    [
        (["END"], ["a", "xENDy", "z"], ["a", "x"], "END"),  # inside one piece
        (["END"], ["a", "E", "N", "D", "z"], ["a", "", "", ""], "END"),  # across pieces
        (["END"], ["E", "NDx"], ["", ""], "END"),  # from the very start
        (["END"], ["aE", "NX", "b"], ["a", "ENX", "b", ""], None),  # a near miss is given out
        (["END"], ["a", "EN"], ["a", "", "EN"], None),  # held at the end: flushed
        (["aab"], ["aaa", "ab"], ["a", "a"], "aab"),  # its beginning is in itself
        (["abc", "b"], ["a", "b"], ["", "a"], "b"),  # the first complete one wins
        (["b", "abc"], ["a", "bc"], ["", "a"], "b"),  # in either order
        (["bc", "abc"], ["abc"], [""], "abc"),  # ending together: the longer
        (["👍"], ["x👍y"], ["x"], "👍"),
        ([], ["a", "b"], ["a", "b", ""], None),
    ],
)
def test_text_ends_at_the_first_complete_stop_string(
    stop: list[str], pieces: list[str], expected: list[str], found: str | None
) -> None:
    assert run_stops(stop, pieces) == (expected, found)


def test_the_stop_string_is_kept_if_asked_for() -> None:
    assert run_stops(["END"], ["aE", "NDb"], include=True) == (["a", "END"], "END")


def _expected(stop: Sequence[str], text: str) -> tuple[str, str | None]:
    """By definition: grow the text by a character at a time, until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=10),
)
def test_how_text_is_cut_into_pieces_changes_nothing(stop: list[str], pieces: list[str]) -> None:
    texts, found = run_stops(stop, pieces)
    assert ("".join(texts), found) == _expected(stop, "".join(pieces))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=3), max_size=10),
)
def test_no_more_is_held_than_could_become_a_stop_string(
    stop: list[str], pieces: list[str]
) -> None:
    stops = StopStrings(stop)
    so_far = given_out = ""
    for piece in pieces:
        text, found = stops.push(piece)
        if found is not None:
            return
        so_far += piece
        given_out += text
        longest = max(
            size for s in stop for size in range(len(s)) if so_far.endswith(s[:size] or "")
        )
        assert len(so_far) - len(given_out) == longest


def count_tokens_at_stop(ids: Sequence[int], stop: Sequence[str], size: int) -> tuple[str, int]:
    detokenizer = Detokenizer(vocabulary_of(BYTE_LEVEL), TextOptions(stop=stop))
    text, count = "", 0
    for start in range(0, len(ids), size):
        delta = detokenizer.push(ids[start : start + size])
        text += delta.text
        count += delta.num_tokens
        if delta.stop is not None:
            return text, count
    return text + detokenizer.finish().text, count


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_a_stop_string_ends_a_sequence_at_the_token_that_completed_it(size: int) -> None:
    ids = BYTE_LEVEL.encode("one two three four five").ids
    complete = next(n for n in range(len(ids)) if "two t" in BYTE_LEVEL.decode(ids[:n]))
    assert count_tokens_at_stop(ids, ["two t"], size) == ("one ", complete)


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_stop_string_counts_behind_the_tokens_that_there_must_be(size: int) -> None:
    ids = byte_ids(BYTE_LEVEL, b"END ENDx ENDy")
    for min_tokens, expected in ((0, ""), (1, "END "), (2, "END "), (5, "END ENDx "), (99, None)):
        detokenizer = Detokenizer(
            vocabulary_of(BYTE_LEVEL), TextOptions(stop=["END"], min_tokens=min_tokens)
        )
        text = ""
        for start in range(0, len(ids), size):
            delta = detokenizer.push(ids[start : start + size])
            text += delta.text
            if delta.stop is not None:
                break
        assert text == (expected if expected is not None else "END ENDx ENDy")


def test_unfinished_bytes_can_complete_a_stop_string() -> None:
    detokenizer = Detokenizer(vocabulary_of(BYTE_LEVEL), TextOptions(stop=["a\ufffd"]))
    assert detokenizer.push(byte_ids(BYTE_LEVEL, b"ba\xf0")).text == "b"
    assert detokenizer.finish().stop == "a\ufffd"
