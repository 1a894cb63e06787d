"""Tokens of reasoning are counted one by one: those up to the closing mark, and with it."""

from __future__ import annotations

import pytest

from gateway.tools.reasoning import ReasoningCounter


@pytest.mark.parametrize(
    ("pieces", "is_open", "expected"),
    [
        (["<think>", "a", "b", "</think>", "c"], False, 4),
        (["<thi", "nk>a", "</th", "ink>c", "d"], False, 4),
        (["\n", "<think>", "a"], False, 3),
        (["<think>a</think>b"], False, 1),
        (["<th", "e"], False, 0),
        (["hello", "<think>", "a", "</think>"], False, 0),
        (["a", "</think>", "b"], True, 2),
        (["</think>"], True, 1),
        (["a", "b"], True, 2),
        ([], True, 0),
        (["<thi"], False, 0),
    ],
)
def test_what_counts(pieces: list[str], is_open: bool, expected: int) -> None:
    counter = ReasoningCounter(is_open=is_open)
    counter.push(piece.encode() for piece in pieces)
    assert counter.num_tokens == expected
