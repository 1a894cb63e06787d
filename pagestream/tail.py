"""`pagestream tail`: follows a stream, one readable line an entry. Only reads.

Bodies are decoded by `wire.codec`; long columns of numbers are cut short.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from dataclasses import fields, is_dataclass
from typing import Any

from wire.bus import Bus, Entry
from wire.codec import WireError, decode
from wire.config import Settings

_SHOWN = 8  # numbers of a column
_FIRST = 10  # entries that are shown before those to come
_TEXT = 80  # characters
_OF_PROCESSES = {"steps": "worker", "results": "worker", "out": "gateway"}


async def follow(settings: Settings, name: str) -> AsyncIterator[str]:
    """Yield a line for each of the last entries of a stream, then for each new one, for ever.

    `name` is a key or its short name; `steps`, `results` and `out` mean those of every process.
    Raises BusError, or its kinds.
    """
    bus = Bus.connect(settings)
    try:
        keys = await _keys(bus, name)
        entries = [entry for key in keys for entry in await bus.newest(key, _FIRST)]
        cursors = dict.fromkeys(keys, "0-0") | {entry.key: entry.entry_id for entry in entries}
        reader = bus.reader(cursors)
        try:
            while True:
                for entry in entries:
                    yield line(entry)
                entries = await reader.read()
        finally:
            await reader.close()
    finally:
        await bus.close()


async def _keys(bus: Bus, name: str) -> list[str]:
    if name not in _OF_PROCESSES:
        return [bus.keys.named(name)]
    found = await bus.processes(_OF_PROCESSES[name])
    return [
        bus.keys.named(f"{name}:{one}.{said['incarnation']}")
        for one, said in found.items()
        if "incarnation" in said
    ]


def line(entry: Entry) -> str:
    """Turn an entry into a line: id, where, plain fields, then the message."""
    plain = [
        f"{name}={value.decode(errors='replace')[:_TEXT]}"
        for name, value in entry.fields.items()
        if name not in ("body", "id")
    ]
    where = entry.key.split("}:", 1)[-1]
    return " ".join(filter(None, [entry.entry_id, where, *plain, _message(entry.body)]))


def _message(body: bytes) -> str:
    if not body:
        return ""
    try:
        return _value(decode(body))
    except WireError as error:
        return f"<{len(body)} bytes: {error}>"


def _value(value: Any) -> str:
    """One value, readable and short; fields that are empty are left out."""
    if is_dataclass(value):
        parts = {one.name: _value(getattr(value, one.name)) for one in fields(value)}
        shown = ", ".join(f"{name}={text}" for name, text in parts.items() if _says(text))
        return f"{type(value).__name__}({shown})"
    if isinstance(value, list | array):
        shown = ", ".join(_value(item) for item in value[:_SHOWN])
        more = f", … {len(value)} in all" if len(value) > _SHOWN else ""
        return f"[{shown}{more}]"
    if isinstance(value, str):
        return repr(value if len(value) <= _TEXT else f"{value[:_TEXT]}…")
    return repr(value)


def _says(text: str) -> bool:
    return text not in ("None", "False", "''", "[]") and not text.endswith("()")
