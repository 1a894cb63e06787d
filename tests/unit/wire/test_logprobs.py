"""Records of log-probabilities: what is written is read, and nothing else is."""

from __future__ import annotations

import pytest

from tests.fakes.fake_logprobs import logprob_of, record, top_of
from wire.logprobs import LogprobRecord, read_records, record_size, stored, stored_in


def test_records_are_read_as_they_were_written() -> None:
    records = record(7, 2, 100) + record(90, 2, 100)
    assert len(records) == 2 * record_size(2)
    assert list(read_records(records, 2)) == [
        LogprobRecord(7, logprob_of(7), 3, tuple(top_of(7, 2, 100))),
        LogprobRecord(90, logprob_of(90), 1, tuple(top_of(90, 2, 100))),
    ]
    assert next(read_records(record(7, 0, 100), 0)).top == ()
    assert list(read_records(b"", 3)) == []


def test_bytes_of_another_size_are_no_records() -> None:
    with pytest.raises(ValueError, match="no records"):
        list(read_records(record(7, 2, 100), 1))


def test_a_hash_holds_records_among_other_fields() -> None:
    fields = {"status": "running", **stored(0, b"\x00\xff"), **stored(-12, b"")}
    assert dict(stored_in(fields)) == {0: b"\x00\xff", -12: b""}
    with pytest.raises(ValueError, match=r"base64|padding"):
        list(stored_in({"logprobs:0": "none"[:3]}))
