"""What is said of a sequence that may be read again does not depend on when its tokens came."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.detokenizer import TextOptions
from gateway.output_router import Followed, SequenceDelta
from gateway.sequences import Reading, ReadSequence, SequenceOutput
from gateway.vocabulary import read_vocabulary
from tests.fakes.tokenizers import byte_level_tokenizer
from wire.answer_record import AnswerRecord
from wire.messages import FinishedRequest, FinishReason, StartedRequest

TOKENIZER = byte_level_tokenizer()
VOCABULARY = read_vocabulary(TOKENIZER)
IDS: list[int] = TOKENIZER.encode("one two 👍🏽 three, 你好, hello").ids
STARTED = StartedRequest(1, 2, 3)


def sequence(*, is_resumable: bool = True, stop: list[str] | None = None) -> ReadSequence:
    record = AnswerRecord(("r",), "somehow" if is_resumable else "")
    reading = Reading(TextOptions(stop=stop or []), VOCABULARY, idle_s=1.0)
    return ReadSequence(0, Followed("r", record), reading)


def said(
    made: ReadSequence, cuts: list[int], reason: FinishReason = "length", *, late: bool = False
) -> list[SequenceOutput]:
    """All outputs, when the tokens come in pieces that are cut there."""
    edges = [0, *sorted(cuts), len(IDS)]
    deltas = [SequenceDelta(IDS[start:end]) for start, end in pairwise(edges)]
    deltas[0].started = STARTED
    end = FinishedRequest(1, len(IDS), reason)
    if late:
        deltas.append(SequenceDelta(finished=end))
    else:
        deltas[-1].finished = end
    outputs: list[SequenceOutput] = []
    for delta in deltas:
        if made.is_open:
            outputs += made.advance(delta)
    return outputs


CUTS = st.lists(st.integers(0, len(IDS) - 1), max_size=6)
STOPS = st.sampled_from([[], ["two"], ["e t", "three"], ["👍"], ["never"], ["e!"]])


@given(CUTS, STOPS, st.sampled_from(["length", "stop", "abort"]))
def test_how_tokens_come_changes_nothing(cuts: list[int], stop: list[str], reason: Any) -> None:
    whole = said(sequence(stop=stop), [], reason)
    assert said(sequence(stop=stop), cuts, reason) == whole
    if reason == "abort":  # an end that no token brought may come at any time
        assert said(sequence(stop=stop), cuts, reason, late=True) == whole


def test_each_output_is_one_token_and_the_end_comes_with_the_last() -> None:
    outputs = said(sequence(), [3])
    assert [list(output.token_ids) for output in outputs] == [[token] for token in IDS]
    assert [output.num_output_tokens for output in outputs] == [*range(1, len(IDS) + 1)]
    assert [output.finish_reason for output in outputs] == [None] * (len(IDS) - 1) + ["length"]
    assert [output.started for output in outputs] == [STARTED] + [None] * (len(IDS) - 1)


def test_an_end_that_no_token_brought_stands_alone() -> None:
    *tokens, end = said(sequence(), [], "abort")
    assert len(tokens) == len(IDS)
    assert (list(end.token_ids), end.finish_reason) == ([], "abort")


def test_an_error_is_raised_behind_all_that_came_before() -> None:
    made = sequence()
    error = FinishedRequest(1, 2, "error", error="broken", error_code="internal")
    outputs = made.advance(SequenceDelta(IDS[:2], finished=error))
    assert len(outputs) == 2
    assert made.has_more
    assert not made.is_open
    assert made.error is not None
    assert made.error.message == "broken"


@pytest.mark.parametrize("is_resumable", [True, False])
def test_a_stop_string_ends_it_before_the_scheduler_does(is_resumable: bool) -> None:
    made = sequence(is_resumable=is_resumable, stop=["two"])
    outputs = made.advance(SequenceDelta(list(IDS)))
    assert "".join(output.text for output in outputs) == "one "
    assert outputs[-1].stop_reason == "two"
    assert made.stops_early
    assert made.num_output_tokens < len(IDS)


def test_what_nobody_comes_back_for_is_said_in_as_few_pieces_as_it_comes() -> None:
    outputs = said(sequence(is_resumable=False), [4])
    assert [list(output.token_ids) for output in outputs] == [IDS[:4], IDS[4:]]
    assert outputs[-1].finish_reason == "length"
