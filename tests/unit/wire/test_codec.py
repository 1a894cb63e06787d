"""The codec carries every message exactly and refuses everything else."""

from __future__ import annotations

import dataclasses
import math
import typing
from array import array
from typing import Annotated, Any, Literal

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.samples import every_message
from wire import codec, messages
from wire.messages import (
    AbortRequest,
    CachedRequestData,
    CommittedTokens,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedRequest,
    Message,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
    request_numbers,
    token_ids,
)

MESSAGES = typing.get_args(Message)

# ---------------------------------------------------------------- any message


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """All values that a type hint of `wire.messages` allows."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        code = hint.__metadata__[0]
        top = 2 ** (8 * array(code).itemsize) - 1
        return st.lists(st.integers(0, top), max_size=20).map(lambda numbers: array(code, numbers))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(values_of(args[0]), max_size=5)
    if type(None) in args:
        return st.none() | values_of(args[0])
    if dataclasses.is_dataclass(hint):
        return any_of(hint)
    return {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(),
        bool: st.booleans(),
        bytes: st.binary(),
    }[hint]


def any_of(cls: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls, vars(messages), include_extras=True)
    return st.builds(cls, **{field.name: values_of(hints[field.name]) for field in fields(cls)})


def fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


@pytest.mark.parametrize("cls", MESSAGES)
def test_every_message_survives_the_journey(cls: Any):
    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(any_of(cls))
    def survives(message: Any) -> None:
        body = codec.encode(message)
        assert type(body) is bytes
        arrived = codec.decode(body)
        assert arrived == message
        assert repr(arrived) == repr(message)  # no True for 1, no 1.0 for 1
        assert codec.decode_as(cls, body) == message

    survives()


def test_every_message_has_a_tag():
    assert {type(message) for message in every_message()} == set(MESSAGES)
    tags = [msgpack.unpackb(codec.encode(message))[1] for message in every_message()]
    assert len(set(tags)) == len(MESSAGES)


def test_the_samples_leave_no_field_at_its_default():
    def unused(value: Any) -> list[str]:
        names = []
        for field in fields(type(value)):
            found = getattr(value, field.name)
            if found in (field.default, []):
                names.append(f"{type(value).__name__}.{field.name}")
            for inner in found if isinstance(found, list) else [found]:
                names += unused(inner) if dataclasses.is_dataclass(inner) else []
        return names

    assert [name for message in every_message() for name in unused(message)] == []


def test_a_batch_that_does_not_change_is_a_few_bytes():
    step = SchedulerOutput(epoch=1_800_000_000_000, step_id=1_000_000, num_decodes=256)
    assert len(codec.encode(step)) < 32


def test_decoding_as_another_message_is_refused():
    body = codec.encode(AbortRequest("r"))
    with pytest.raises(codec.WireError, match="expected SchedulerOutput, got AbortRequest"):
        codec.decode_as(SchedulerOutput, body)


# ---------------------------------------------------------------- growing messages


@pytest.mark.parametrize("message", every_message(), ids=lambda message: type(message).__name__)
def test_fields_that_an_older_writer_leaves_out_have_their_defaults(message: Message):
    version, tag, *values = msgpack.unpackb(codec.encode(message))
    required = [
        field
        for field in fields(type(message))
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    for count in range(len(required), len(values)):
        arrived = codec.decode(msgpack.packb([version, tag, *values[:count]]))
        for n, field in enumerate(fields(type(message))):
            if n < count:
                assert getattr(arrived, field.name) == getattr(message, field.name)
            elif field.default is not dataclasses.MISSING:
                assert getattr(arrived, field.name) == field.default
            else:
                assert getattr(arrived, field.name) == field.default_factory()
    if required:
        with pytest.raises(codec.WireError):
            codec.decode(msgpack.packb([version, tag, *values[: len(required) - 1]]))


# ---------------------------------------------------------------- what is refused

ABORT = [1, 2, "r", "abort", None]
STEP = [1, 3, 5, 1, [], [[], [], []], 0, [], []]
RESULT = [1, 4, 5, 1, b"", [], 0, None]
OUTPUTS = [1, 5, b"", b"", b"", [], []]
REQUEST = [1, 1, "r", "g.1", 1, b"", [16, 1.0, 1.0, 0, 0.0, 0, [], []]]


def with_value(message: list[Any], index: int, value: Any) -> list[Any]:
    return [*message[:index], value, *message[index + 1 :]]


REFUSED: dict[str, Any] = {
    "nothing": [],
    "no tag": [1],
    "no array": {"version": 1},
    "a number": 7,
    "version 0": with_value(ABORT, 0, 0),
    "version 2": with_value(ABORT, 0, 2),
    "version true": with_value(ABORT, 0, True),
    "version 1.0": with_value(ABORT, 0, 1.0),
    "version text": with_value(ABORT, 0, "1"),
    "version list": with_value(ABORT, 0, [1]),
    "tag 0": with_value(ABORT, 1, 0),
    "tag 99": with_value(ABORT, 1, 99),
    "tag true": with_value(REQUEST, 1, True),
    "tag list": with_value(ABORT, 1, [2]),
    "too few fields": ABORT[:2],
    "too many fields": [*ABORT, None],
    "too many inner fields": with_value(STEP, 5, [[], [], [], []]),
    "no list for a message": with_value(STEP, 5, None),
    "bool for int": with_value(STEP, 6, True),
    "float for int": with_value(STEP, 6, 1.0),
    "text for int": with_value(STEP, 6, "1"),
    "none for int": with_value(STEP, 6, None),
    "int for text": with_value(ABORT, 2, 1),
    "bytes for text": with_value(ABORT, 2, b"r"),
    "another word": with_value(ABORT, 3, "pause"),
    "int for a word": with_value(ABORT, 3, 1),
    "text for an optional int": with_value(ABORT, 4, "1"),
    "int for a float": with_value(REQUEST, 6, [16, 1, 1.0, 0, 0.0, 0, [], []]),
    "nan": with_value(REQUEST, 6, [16, math.nan, 1.0, 0, 0.0, 0, [], []]),
    "infinity": with_value(REQUEST, 6, [16, math.inf, 1.0, 0, 0.0, 0, [], []]),
    "text for bool": [*REQUEST, 0, None, "t", None, "yes"],
    "int for bool": [*REQUEST, 0, None, "t", None, 1],
    "bool in a list of int": with_value(STEP, 7, [1, True]),
    "float in a list of int": with_value(STEP, 7, [1.0]),
    "none in a list of int": with_value(STEP, 7, [None]),
    "bytes for a list": with_value(STEP, 7, b"\x01"),
    "text for a list": with_value(STEP, 7, "12"),
    "flat list of lists": with_value(STEP, 5, [[1], [1], [1]]),
    "list for packed tokens": with_value(RESULT, 4, [1, 2]),
    "text for packed tokens": with_value(RESULT, 4, "abcd"),
    "half a packed token": with_value(RESULT, 4, b"\x01\x02\x03"),
    "half a packed number": [1, 6, b"\x01\x02\x03\x04", b"", False],
    "none for packed tokens": with_value(OUTPUTS, 2, None),
    "map for a field": with_value(STEP, 4, {}),
    "map with text keys": with_value(STEP, 4, {"a": 1}),
    "map with other keys": with_value(STEP, 4, {1: 2}),
    "extension type": with_value(RESULT, 4, msgpack.ExtType(5, b"abcd")),
    "time stamp": with_value(STEP, 6, msgpack.Timestamp(1)),
    "numpy in disguise": with_value(RESULT, 4, {b"nd": True, b"type": "<u4", b"data": b""}),
}


def packed(value: Any) -> bytes:
    return typing.cast("bytes", msgpack.packb(value))


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_exactly_a_message_is_refused(body: Any):
    with pytest.raises(codec.WireError):
        codec.decode(packed(body))


@pytest.mark.parametrize("body", [ABORT, STEP, RESULT, OUTPUTS, REQUEST])
def test_the_table_of_refusals_starts_from_messages_that_pass(body: Any):
    codec.decode(packed(body))


GARBAGE = {
    "empty": b"",
    "trailing byte": packed(ABORT) + b"\x00",
    "two messages": packed(ABORT) * 2,
    "cut short": packed(ABORT)[:-1],
    "not utf-8": packed(ABORT).replace(b"abort", b"ab\xffrt"),
    "half a surrogate pair": packed([1, 2, "abc"]).replace(b"abc", b"\xed\xa0\x80"),
    "reserved byte": b"\xc1",
    "pickle": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "yaml": b"!!python/object/apply:os.system ['true']",
    "json": b'[1, 2, "r"]',
    "nested 2000 deep": b"\x91" * 2000 + b"\xc0",
    "nested a million deep": b"\x91" * 1_000_000 + b"\xc0",
    "nested maps": b"\x81\xa1a" * 2000 + b"\xc0",
    "a list that claims four billion": b"\xdd\xff\xff\xff\xff",
    "bytes that claim four billion": b"\xc6\xff\xff\xff\xff",
    "a map that claims four billion": b"\xdf\xff\xff\xff\xff",
    "an extension of no bytes": packed(STEP)[:-1] + b"\xc7\x00\x05",
}


@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
def test_bytes_that_are_no_message_are_refused(body: bytes):
    with pytest.raises(codec.WireError) as refused:
        codec.decode(body)
    assert len(str(refused.value)) < 300  # it goes into the log and to `dead`


OVERSIZED = {
    "too many bytes": (bytes(codec.MAX_MESSAGE_BYTES + 1), "at most"),
    "ten million empty lists": (b"\xdd\x00\x98\x96\x80" + b"\x90" * 10_000_000, "not msgpack"),
    "two million characters": (packed([1, 2, "r" * 2_000_000]), "not msgpack"),
    "a map": (packed([1, 2, {"r": "r"}]), "not msgpack"),
}


@pytest.mark.parametrize(("body", "reason"), OVERSIZED.values(), ids=OVERSIZED.keys())
def test_what_is_too_large_is_refused_before_it_is_built(body: bytes, reason: str):
    with pytest.raises(codec.WireError, match=reason):
        codec.decode(body)


class Number(int):
    """Not an int."""


SAMPLING = SamplingParams(max_tokens=1)
UNSENDABLE: dict[str, Any] = {
    "no message": SAMPLING,
    "no object of ours": object(),
    "a class": AbortRequest,
    "bool for int": SchedulerOutput(True, 1),
    "float for int": SchedulerOutput(1.0, 1),
    "subclass of int": SchedulerOutput(Number(1), 1),
    "2**64": SchedulerOutput(2**64, 1),
    "-2**63 - 1": SchedulerOutput(-(2**63) - 1, 1),
    "2**64 in a list": SchedulerOutput(1, 1, finished_reqs=[2**64]),
    "bool in a list": SchedulerOutput(1, 1, finished_reqs=[True]),
    "float in a nested list": SchedulerOutput(
        1,
        1,
        cached_reqs=CachedRequestData([1], [1], [[1.0]]),
    ),
    "tuple for list": SchedulerOutput(1, 1, finished_reqs=(1,)),
    "none": AbortRequest(None),
    "half a surrogate pair": AbortRequest("\ud800"),
    "bytes for text": AbortRequest(b"r"),
    "another word": AbortRequest("r", "pause"),
    "nan": EngineCoreRequest("r", "g", 1, token_ids(), SamplingParams(1, temperature=math.nan)),
    "list for packed tokens": ModelRunnerOutput(1, 1, [1]),
    "numbers for tokens": ModelRunnerOutput(1, 1, request_numbers([1])),
    "tokens for numbers": CommittedTokens(token_ids([1]), token_ids([1])),
    "another message inside": EngineCoreOutputs(finished=[SAMPLING]),
    "map inside": EngineCoreOutputs(finished=[{"handle": 1}]),
    "too large": ModelRunnerOutput(1, 1, array("I", bytes(codec.MAX_MESSAGE_BYTES))),
}


@pytest.mark.parametrize("message", UNSENDABLE.values(), ids=UNSENDABLE.keys())
def test_what_no_message_may_carry_is_not_sent(message: Any):
    with pytest.raises(codec.WireError):
        codec.encode(message)


def test_the_widest_values_pass():
    step = SchedulerOutput(2**64 - 1, -(2**63), finished_reqs=[2**64 - 1, 0, -(2**63)])
    assert codec.decode(codec.encode(step)) == step
    finished = FinishedRequest(1, 2**40, "error", error="\U0001f600 \x00")
    assert codec.decode(codec.encode(EngineCoreOutputs(finished=[finished]))) == EngineCoreOutputs(
        finished=[finished]
    )


def test_a_refusal_names_the_field():
    with pytest.raises(codec.WireError, match=r"SchedulerOutput\.num_decodes: expected int"):
        codec.decode(packed(with_value(STEP, 6, "three")))
    with pytest.raises(codec.WireError, match=r"AbortRequest\.req_id: expected str"):
        codec.encode(AbortRequest(7))


def test_arguments_of_scripts_are_plain_msgpack_of_the_old_kind():
    half = b"\xcb?\xe0" + bytes(6)
    assert codec.pack_for_script(["a", b"\xff", 1, [0.5]]) == b"\x94\xa1a\xa1\xff\x01\x91" + half
    for bad in (2**64, "\ud800", object()):
        with pytest.raises(codec.WireError):
            codec.pack_for_script([bad])
