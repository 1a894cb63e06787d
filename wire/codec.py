"""Messages to bytes and back: positional msgpack with a version and a tag, strictly checked.

Owns the format and nothing else; the only importer of msgpack. A message is the array
`[version, tag, field, field, …]` in the order of its dataclass. Decoding trusts nothing: a wrong
type, an unknown version or tag, too many or trailing bytes raise WireError, never anything else.
"""

from __future__ import annotations

import math
import sys
import types
from array import array
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack

from wire import messages
from wire.messages import Message

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1

M = TypeVar("M")
Pack = Callable[[Any], Any]
Unpack = Callable[[Any, str], Any]


class WireError(ValueError):
    """Bytes that are no message of this version, or a value that no message may carry."""


# ---------------------------------------------------------------- one packer and unpacker a type


def _int(value: Any, where: str) -> int:
    if type(value) is not int or not _INT_MIN <= value <= _INT_MAX:
        raise WireError(f"{where}: expected a 64-bit integer, got {type(value).__name__}")
    return value


def _float(value: Any, where: str) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise WireError(f"{where}: expected a finite float, got {type(value).__name__}")
    return value


def _exactly(kind: type) -> Unpack:
    def check(value: Any, where: str) -> Any:
        if type(value) is not kind:
            raise WireError(f"{where}: expected {kind.__name__}, got {type(value).__name__}")
        return value

    return check


def _one_of(choices: Sequence[str]) -> Unpack:
    def check(value: Any, where: str) -> Any:
        if type(value) is not str or value not in choices:
            raise WireError(f"{where}: expected one of {', '.join(choices)}")
        return value

    return check


def _packed(typecode: str) -> tuple[Pack, Unpack]:
    """Arrays travel as their little-endian bytes."""
    itemsize = array(typecode).itemsize
    swap = sys.byteorder == "big"

    def pack(value: Any) -> bytes:
        if type(value) is not array or value.typecode != typecode:
            raise WireError(f"expected array({typecode!r}), got {type(value).__name__}")
        if swap:
            value = array(typecode, value)
            value.byteswap()
        return cast("array[int]", value).tobytes()

    def unpack(value: Any, where: str) -> array[int]:
        if type(value) is not bytes or len(value) % itemsize:
            raise WireError(f"{where}: expected a multiple of {itemsize} bytes")
        column = array(typecode, value)
        if swap:
            column.byteswap()
        return column

    return pack, unpack


def _optional(pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    return (
        lambda value: None if value is None else pack(value),
        lambda value, where: None if value is None else unpack(value, where),
    )


def _list(pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    check = _exactly(list)
    return (
        lambda values: [pack(value) for value in check(values, "list")],
        lambda values, where: [unpack(value, where) for value in check(values, where)],
    )


def _plain(unpack: Unpack) -> tuple[Pack, Unpack]:
    """A type that msgpack carries as it is: packing only checks."""
    return (lambda value: unpack(value, type(value).__name__)), unpack


_PLAIN: dict[Any, Unpack] = {
    int: _int,
    float: _float,
    str: _exactly(str),
    bytes: _exactly(bytes),
    bool: _exactly(bool),
}


def _coders(hint: Any) -> tuple[Pack, Unpack]:
    origin, args = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _plain(_PLAIN[hint])
    if origin is Annotated:
        return _packed(hint.__metadata__[0])
    if origin is Literal:
        return _plain(_one_of(args))
    if origin is list:
        return _list(*_coders(args[0]))
    if origin in (Union, types.UnionType) and len(args) == 2 and args[1] is type(None):
        return _optional(*_coders(args[0]))
    if is_dataclass(hint):
        return _dataclass(cast("type", hint))
    raise TypeError(f"no wire format for {hint!r}")


def _dataclass(cls: type) -> tuple[Pack, Unpack]:
    hints = get_type_hints(cls, vars(messages), include_extras=True)
    names = [field.name for field in fields(cls)]
    coders = [_coders(hints[name]) for name in names]
    packers = [(name, coder[0]) for name, coder in zip(names, coders, strict=True)]
    unpackers = [(f"{cls.__name__}.{n}", c[1]) for n, c in zip(names, coders, strict=True)]
    required = sum(f.default is MISSING and f.default_factory is MISSING for f in fields(cls))

    def pack(message: Any) -> list[Any]:
        if type(message) is not cls:
            raise WireError(f"expected {cls.__name__}, got {type(message).__name__}")
        return [pack_field(getattr(message, name)) for name, pack_field in packers]

    def unpack(values: Any, where: str) -> Any:
        if type(values) is not list or not required <= len(values) <= len(unpackers):
            raise WireError(f"{where}: expected {required} to {len(unpackers)} fields")
        return cls(*[u(v, name) for v, (name, u) in zip(values, unpackers, strict=False)])

    return pack, unpack


# ---------------------------------------------------------------- the door

_TAGS: dict[type, int] = {
    messages.EngineCoreRequest: 1,
    messages.AbortRequest: 2,
    messages.SchedulerOutput: 3,
    messages.ModelRunnerOutput: 4,
    messages.EngineCoreOutputs: 5,
    messages.CommittedTokens: 6,
}
_CODERS = {cls: _dataclass(cls) for cls in _TAGS}
_CLASSES = {tag: cls for cls, tag in _TAGS.items()}


def encode(message: Message) -> bytes:
    """Turn a message into bytes. WireError if a field holds what its type does not say."""
    cls = type(message)
    if cls not in _TAGS:
        raise WireError(f"{cls.__name__} is no message")
    try:
        packed = msgpack.packb([WIRE_VERSION, _TAGS[cls], *_CODERS[cls][0](message)])
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise WireError(f"{cls.__name__}: {error}") from None
    if len(packed) > MAX_MESSAGE_BYTES:
        raise WireError(f"{cls.__name__}: {len(packed)} bytes, at most {MAX_MESSAGE_BYTES}")
    return cast("bytes", packed)


def decode(body: bytes) -> Message:
    """Turn bytes into a message. WireError for anything that is not exactly one."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"{len(body)} bytes, at most {MAX_MESSAGE_BYTES}")
    try:
        values = msgpack.unpackb(body, use_list=True, raw=False, max_ext_len=0)
    except Exception as error:  # msgpack raises five unrelated types, ValueError among them
        raise WireError(f"not msgpack: {type(error).__name__}: {error}"[:200]) from None
    if type(values) is not list or len(values) < 2:
        raise WireError("expected an array of version, tag and fields")
    version, tag, *rest = values
    if type(version) is not int or version != WIRE_VERSION:
        raise WireError(f"version {version!r:.40}, this process speaks {WIRE_VERSION}")
    if type(tag) is not int or tag not in _CLASSES:
        raise WireError(f"unknown tag {tag!r:.40}")
    cls = _CLASSES[tag]
    return cast("Message", _CODERS[cls][1](rest, cls.__name__))


def decode_as(cls: type[M], body: bytes) -> M:
    """Like `decode`, for a stream that carries one kind of message only."""
    message = decode(body)
    if not isinstance(message, cls):
        raise WireError(f"expected {cls.__name__}, got {type(message).__name__}")
    return message


def pack_for_script(part: object) -> bytes:
    """Pack plain values for a Lua script, whose msgpack knows strings but no bytes type."""
    return cast("bytes", msgpack.packb(part, use_bin_type=False))
