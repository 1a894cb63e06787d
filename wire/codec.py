"""Messages to bytes and back: positional msgpack with a version and a tag, strictly checked.

Owns the format and nothing else; the only importer of msgpack. A message is the array
`[version, tag, field, field, …]` in the order of its dataclass; there are no maps, no extension
types and no objects but ours. Decoding trusts nothing: whatever is not exactly a message raises
WireError, never anything else.

A message may grow: new fields go to the end and have a default, and fields at the end that hold
their default are left out. So an older reader understands a newer writer, until that uses what is
new: then it refuses rather than do something else. Any other change needs a new WIRE_VERSION.
"""

from __future__ import annotations

import math
import sys
import types
from array import array
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
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

_LIMITS = {
    "max_array_len": 2**20,
    "max_str_len": 2**20,
    "max_map_len": 0,
    "max_ext_len": 0,
}

M = TypeVar("M")
Convert = Callable[[Any, str], Any]
"""Check a value, named by the second argument, and give its other form."""


class WireError(ValueError):
    """Bytes that are no message of this version, or a value that no message may carry."""


class VersionError(WireError):
    """Bytes that may be a message, of a version that this process does not speak."""


# ---------------------------------------------------------------- one coder a type


@dataclass(frozen=True, slots=True)
class _Coder:
    """How one type travels."""

    pack: Convert
    unpack: Convert
    plain: type | None = None  # msgpack carries exactly this type as it is: a look suffices


def _plain(kind: type) -> _Coder:
    def check(value: Any, where: str) -> Any:
        if type(value) is not kind:
            raise _mismatch(where, kind.__name__, value)
        return value

    return _Coder(check, check, plain=kind)


def _float() -> _Coder:
    def check(value: Any, where: str) -> Any:
        if type(value) is not float or not math.isfinite(value):
            raise _mismatch(where, "a finite float", value)
        return value

    return _Coder(check, check)


def _one_of(choices: Sequence[str]) -> _Coder:
    def check(value: Any, where: str) -> Any:
        if type(value) is not str or value not in choices:
            raise _mismatch(where, f"one of {', '.join(choices)}", value)
        return value

    return _Coder(check, check)


def _packed(typecode: str) -> _Coder:
    """Arrays travel as their little-endian bytes."""
    itemsize = array(typecode).itemsize
    swap = sys.byteorder == "big"

    def pack(value: Any, where: str) -> bytes:
        if type(value) is not array or value.typecode != typecode:
            raise _mismatch(where, f"array({typecode!r})", value)
        if swap:
            value = array(typecode, value)
            value.byteswap()
        return cast("array[int]", value).tobytes()

    def unpack(value: Any, where: str) -> array[int]:
        if type(value) is not bytes or len(value) % itemsize:
            raise _mismatch(where, f"a multiple of {itemsize} bytes", value)
        column = array(typecode, value)
        if swap:
            column.byteswap()
        return column

    return _Coder(pack, unpack)


def _optional(coder: _Coder) -> _Coder:
    return _Coder(
        lambda value, where: None if value is None else coder.pack(value, where),
        lambda value, where: None if value is None else coder.unpack(value, where),
    )


def _list(coder: _Coder) -> _Coder:
    if coder.plain is not None:
        return _plain_list(coder.plain)

    def each(convert: Convert) -> Convert:
        def convert_all(values: Any, where: str) -> Any:
            if type(values) is not list:
                raise _mismatch(where, "list", values)
            return [convert(value, where) for value in values]

        return convert_all

    return _Coder(each(coder.pack), each(coder.unpack))


def _plain_list(kind: type) -> _Coder:
    """A list that msgpack carries as it is; block tables are long, so it is looked at in bulk."""
    kinds = {kind}

    def check(values: Any, where: str) -> Any:
        if type(values) is not list or not kinds.issuperset(map(type, values)):
            raise _mismatch(where, f"a list of {kind.__name__}", values)
        return values

    return _Coder(check, check)


def _dataclass(cls: type) -> _Coder:
    hints = get_type_hints(cls, vars(messages), include_extras=True)
    names = [field.name for field in fields(cls)]
    coders = [(name, f"{cls.__name__}.{name}", _coder(hints[name])) for name in names]
    defaults = [_default(field) for field in fields(cls)]
    required = defaults.count(MISSING)

    def pack(message: Any, where: str) -> list[Any]:
        if type(message) is not cls:
            raise _mismatch(where, cls.__name__, message)
        used = len(coders)
        while used > required and _is_same(getattr(message, names[used - 1]), defaults[used - 1]):
            used -= 1
        values = []
        for name, path, coder in coders[:used]:
            value = getattr(message, name)
            values.append(value if type(value) is coder.plain else coder.pack(value, path))
        return values

    def unpack(values: Any, where: str) -> Any:
        if type(values) is list and len(values) > len(coders):
            raise VersionError(
                f"{cls.__name__}: {len(values)} fields, this process knows {len(coders)}: a newer "
                "version wrote it, and uses what is new"
            )
        if type(values) is not list or len(values) < required:
            raise _mismatch(where, f"{required} to {len(coders)} fields", values)
        return cls(
            *[
                value if type(value) is coder.plain else coder.unpack(value, path)
                for value, (_, path, coder) in zip(values, coders, strict=False)
            ]
        )

    return _Coder(pack, unpack)


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _is_same(value: Any, default: Any) -> bool:
    """Whether leaving the value out is the same as saying it."""
    return type(value) is type(default) and bool(value == default)


def _coder(hint: Any) -> _Coder:
    origin, args = get_origin(hint), get_args(hint)
    if hint is float:
        coder = _float()
    elif hint in (int, str, bytes, bool):
        coder = _plain(hint)
    elif origin is Annotated:
        coder = _packed(hint.__metadata__[0])
    elif origin is Literal:
        coder = _one_of(args)
    elif origin is list:
        coder = _list(_coder(args[0]))
    elif origin in (Union, types.UnionType) and len(args) == 2 and args[1] is type(None):
        coder = _optional(_coder(args[0]))
    elif is_dataclass(hint):
        coder = _dataclass(cast("type", hint))
    else:
        raise TypeError(f"no wire format for {hint!r}")
    return coder


def _mismatch(where: str, expected: str, value: Any) -> WireError:
    return WireError(f"{where}: expected {expected}, got {type(value).__name__}")


# ---------------------------------------------------------------- the door

_TAGS: dict[type, int] = {
    messages.EngineCoreRequest: 1,
    messages.AbortRequest: 2,
    messages.SchedulerOutput: 3,
    messages.ModelRunnerOutput: 4,
    messages.EngineCoreOutputs: 5,
    messages.CommittedTokens: 6,
    messages.ResumeRequest: 7,
    messages.ConfigChange: 8,
}
_CODERS = {cls: _dataclass(cls) for cls in _TAGS}
_CLASSES = {tag: cls for cls, tag in _TAGS.items()}


def encode(message: Message) -> bytes:
    """Turn a message into bytes. WireError if a field holds what its type does not say."""
    cls = type(message)
    if cls not in _TAGS:
        raise WireError(f"{cls.__name__} is no message")
    try:
        packed = msgpack.packb(
            [WIRE_VERSION, _TAGS[cls], *_CODERS[cls].pack(message, cls.__name__)]
        )
    except WireError:
        raise
    except (OverflowError, ValueError) as error:  # beyond 64 bits; half a surrogate pair
        raise WireError(f"{cls.__name__}: {error}"[:200]) from None
    if len(packed) > MAX_MESSAGE_BYTES:
        raise WireError(f"{cls.__name__}: {len(packed)} bytes, at most {MAX_MESSAGE_BYTES}")
    return cast("bytes", packed)


def decode(body: bytes) -> Message:
    """Turn bytes into a message. WireError for anything that is not exactly one."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"{len(body)} bytes, at most {MAX_MESSAGE_BYTES}")
    try:
        values = msgpack.unpackb(body, use_list=True, raw=False, **_LIMITS)
    except Exception as error:  # msgpack raises five unrelated types
        raise WireError(f"not msgpack: {type(error).__name__}: {error}"[:200]) from None
    if type(values) is not list or len(values) < 2:
        raise WireError("expected an array of version, tag and fields")
    version, tag, *rest = values
    if type(version) is not int or version != WIRE_VERSION:
        raise VersionError(f"version {version!r:.40}, this process speaks {WIRE_VERSION}")
    if type(tag) is not int or tag not in _CLASSES:
        raise WireError(f"unknown tag {tag!r:.40}")
    cls = _CLASSES[tag]
    return cast("Message", _CODERS[cls].unpack(rest, cls.__name__))


def decode_as(cls: type[M], body: bytes) -> M:
    """Like `decode`, for a stream that carries one kind of message only."""
    message = decode(body)
    if not isinstance(message, cls):
        raise WireError(f"expected {cls.__name__}, got {type(message).__name__}")
    return message


def pack_for_script(part: object) -> bytes:
    """Pack plain values for a Lua script, whose msgpack knows strings but no bytes type.

    Raises WireError, as `encode` does.
    """
    try:
        return cast("bytes", msgpack.packb(part, use_bin_type=False))
    except (OverflowError, ValueError, TypeError) as error:
        raise WireError(f"script argument: {error}"[:200]) from None
