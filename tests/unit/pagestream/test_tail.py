"""How an entry of a stream reads."""

from __future__ import annotations

from pagestream.tail import line
from wire.bus import Entry
from wire.codec import encode
from wire.messages import (
    AbortRequest,
    CachedRequestData,
    EngineCoreRequest,
    SamplingParams,
    SchedulerOutput,
    token_ids,
)


def entry(**fields: bytes) -> Entry:
    return Entry("ps:{default}:steps:w.1", "1700000000000-3", fields)


def test_a_step_reads_as_its_id_plain_fields_and_message() -> None:
    step = SchedulerOutput(7, 3, cached_reqs=CachedRequestData([5], [1], [[9]]), num_decodes=2)
    read = line(entry(decodes=b"2", body=encode(step)))
    assert read.startswith("1700000000000-3 steps:w.1 decodes=2 SchedulerOutput(epoch=7, step_id=3")
    assert "new_block_ids=[[9]]" in read
    assert "finished_reqs" not in read  # nothing to say


def test_long_columns_are_cut_short() -> None:
    request = EngineCoreRequest(
        "a" * 32, "g.1", 1, token_ids(list(range(100, 3000))), SamplingParams(max_tokens=4)
    )
    read = line(entry(kind=b"add", body=encode(request)))
    assert "prompt_token_ids=[100, 101, 102, 103, 104, 105, 106, 107, … 2900 in all]" in read
    assert len(read) < 500


def test_an_entry_is_one_line() -> None:
    abort = AbortRequest("two\nlines")
    assert "\n" not in line(entry(body=encode(abort)))


def test_a_body_that_is_no_message_is_said_to_be_none() -> None:
    assert "<4 bytes: " in line(entry(body=b"\xc1abc"))


def test_an_entry_without_a_message_shows_its_fields() -> None:
    assert line(entry(reason=b"lost")) == "1700000000000-3 steps:w.1 reason=lost"
