"""Traces: what a span is, how its context travels between processes, and who takes it.

A context travels as W3C's `traceparent`, in the HTTP header and in messages. A span is a value that
is handed over when it has ended, so a process that dies leaves none half open. Its id is a digest
of what it is about, so that whoever takes over a request goes on with the same spans, and a
process can name the parent of its own without being told. No span holds a prompt or an output.

Without OTLP_ENDPOINT there is none of this: nothing is imported, and nobody asks for the time.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from wire.config import Settings, SettingsError, without_password

HEADER = "traceparent"

Value = str | int | float | bool | Sequence[str]

_SAMPLED = 1
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of one trace, as others may refer to it."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0
    is_sampled: bool = True

    @classmethod
    def parse(cls, text: str | None) -> TraceContext | None:
        """Read a `traceparent`; None if it is none, which is nobody's error (W3C, 4.3)."""
        match = _FORM.fullmatch(text or "")
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
            return None
        trace_id, span_id = int(match[2], 16), int(match[3], 16)
        if not trace_id or not span_id:
            return None
        return cls(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED))

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    def child(self, *about: object) -> TraceContext:
        """Name a span below this one after what it is about: the same words, the same span."""
        words = f"{self}:{':'.join(map(str, about))}".encode()
        digest = hashlib.sha256(words).digest()[:8]
        return TraceContext(self.trace_id, int.from_bytes(digest) or 1, self.is_sampled)

    def beside(self) -> TraceContext:
        """Name a span of this trace by chance."""
        return TraceContext(self.trace_id, secrets.randbits(64) or 1, self.is_sampled)


def new_trace() -> TraceContext:
    """Begin a trace."""
    return TraceContext(secrets.randbits(128) or 1, secrets.randbits(64) or 1)


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened within a span."""

    name: str
    at_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)


@dataclass(slots=True)
class Span:
    """A stretch of time of one request; times are nanoseconds since 1970."""

    name: str
    context: TraceContext
    parent: TraceContext | None
    start_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    kind: Literal["internal", "server"] = "internal"
    error: str | None = None  # a code; what clients said or got is no part of it

    def event(self, name: str, at_ns: int, **attributes: Value) -> None:
        """Note that something happened."""
        self.events.append(SpanEvent(name, at_ns, attributes))


class Tracing(Protocol):
    """Where spans go. Whatever becomes of them there, nobody here is held up."""

    def begins(self, context: TraceContext) -> bool:
        """Whether a trace that begins here is sampled."""

    def end(self, span: Span, end_ns: int) -> None:
        """Take a span that has ended."""

    async def close(self) -> None:
        """Send what is left, for a moment."""


def open_tracing(settings: Settings, role: str, process: str) -> Tracing | None:
    """Begin to send spans to OTLP_ENDPOINT; None if there is no such setting.

    Raises SettingsError if what is needed for it is not installed.
    """
    if settings.otlp_endpoint is None:
        return None
    try:
        from wire.otlp import Exporter  # noqa: PLC0415 - an extra; slow, and only where it is wanted
    except ImportError as error:
        given = without_password(settings.otlp_endpoint)
        raise SettingsError(
            f"OTLP_ENDPOINT={given}: traces need the extra `otel` "
            f"(pip install 'pagestream[otel]'): {error}"
        ) from None
    return Exporter(settings, role, process)
