"""Requests that are wrong in every way there is: mutations of valid ones, down to the bytes.

Owns the mutations. All choices come from the given random numbers.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

ANSWER_S = 1.0  # after which the client leaves: the server waits for the rest of the request

COMPLETION = {
    "prompt": [1, 2, 3],
    "max_tokens": 4,
    "temperature": 1.0,
    "seed": 7,
    "stop": ["x"],
    "n": 1,
    "stream": False,
    "logit_bias": {"5": 1},
    "stream_options": {"include_usage": True},
}
CHAT = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ],
    "max_tokens": 4,
    "temperature": 0,
    "stream": True,
    "user": "u",
    "response_format": {"type": "text"},
    "tools": [],
}
RESPONSE = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "summary": [], "content": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
    ],
    "instructions": "be brief",
    "max_output_tokens": 4,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "string"}}},
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "none",
    "stream": True,
    "metadata": {"a": "b"},
}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", COMPLETION),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", RESPONSE),
]
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/requests/x",
    "/v1/streams/x",
    "/v1",
    "/%00",
)
METHODS = ("POST", "GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "XYZZY")

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63)),
    *("", "x", "\x00", "\ud800", "é" * 1000, "-1", "NaN", [], {}, [[]], [None], [{}], {"": None}),
    *([1] * 5000, [2**32], [-1], ["a", 1], [[1], [2, 3]], {"type": "json_schema"}),
]
HEADERS = (
    *("Idempotency-Key", "X-Resumable", "X-Priority", "X-Deadline-Ms", "X-Tenant"),
    *("X-Request-Id", "Last-Event-ID", "Authorization", "Content-Type", "Content-Encoding"),
    *("Transfer-Encoding", "Content-Length", "Expect", "Connection", "Accept", "Host"),
)
VALUES = (
    *("", "0", "-1", "1e9", "x" * 300, "x" * 9000, "\x00", "\xff\xfe", "a b", "1,1", "chunked"),
    *("gzip", "application/json", "text/plain", "100-continue", "close", "Bearer", "../..", "{}"),
)


@dataclass
class Message:
    """A request on its way to the wire."""

    method: str
    path: str
    body: Any
    headers: dict[str, str] = field(default_factory=dict)
    damage: Callable[[bytes], bytes] = lambda raw: raw

    def raw(self) -> bytes:
        """All of it as bytes."""
        body = json.dumps(self.body).encode(errors="surrogatepass")
        headers = {"Host": "x", "Content-Type": "application/json"}
        headers |= {"Content-Length": str(len(body)), **self.headers}
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return self.damage("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)


def messages(draw: random.Random) -> Iterator[bytes]:
    """Malformed requests without end."""
    while True:
        path, body = draw.choice(VALID)
        message = Message("POST", path, copy.deepcopy(body))
        for _ in range(draw.randint(1, 3)):
            draw.choice(MUTATIONS)(draw, message)
        yield message.raw()


# ---------------------------------------------------------------- one mutation each


def odd_value(draw: random.Random, message: Message) -> None:
    """Put something odd where something sensible stood, at any depth."""
    where, key = draw.choice(list(places(message.body)) or [(None, None)])
    if where is not None:
        where[key] = copy.deepcopy(draw.choice(ODD))


def no_value(draw: random.Random, message: Message) -> None:
    where, key = draw.choice(list(places(message.body)) or [(None, None)])
    if where is not None:
        del where[key]


def strange_field(draw: random.Random, message: Message) -> None:
    if isinstance(message.body, dict):
        name = draw.choice(("", "x", "best_of", "suffix", "echo", "functions", "é", "__class__"))
        message.body[name] = copy.deepcopy(draw.choice(ODD))


def another_body(draw: random.Random, message: Message) -> None:
    message.body = copy.deepcopy(draw.choice([*ODD, COMPLETION, CHAT, RESPONSE]))


def deep(draw: random.Random, message: Message) -> None:
    nested: Any = 1
    for _ in range(draw.choice((10, 100, 900))):
        nested = [nested] if draw.random() < 0.5 else {"a": nested}
    message.body = {**copy.deepcopy(COMPLETION), draw.choice(("prompt", "logit_bias", "x")): nested}


def header(draw: random.Random, message: Message) -> None:
    message.headers[draw.choice(HEADERS)] = draw.choice(VALUES)


def other_path(draw: random.Random, message: Message) -> None:
    message.path = draw.choice(
        (*PATHS, message.path + draw.choice(("/", "?x=%zz", "%2e%2e", "//")))
    )


def other_method(draw: random.Random, message: Message) -> None:
    message.method = draw.choice(METHODS)


def bytes_of_it(draw: random.Random, message: Message) -> None:
    """Change, lose or double some of the bytes, wherever they are."""
    at, length = draw.random(), draw.randint(1, 8)
    noise = draw.randbytes(length)
    how = draw.randrange(4)

    def damage(raw: bytes) -> bytes:
        start = int(at * len(raw))
        pieces = (noise, b"", raw[start : start + length] * 2, bytes(length))
        return raw[:start] + pieces[how] + raw[start + length :]

    message.damage = damage


def end_early(draw: random.Random, message: Message) -> None:
    at = draw.random()
    message.damage = lambda raw: raw[: int(at * len(raw))]


MUTATIONS: list[Callable[[random.Random, Message], None]] = [
    *(odd_value, odd_value, odd_value, no_value, strange_field, another_body, deep, header, header),
    *(other_path, other_method, bytes_of_it, bytes_of_it, end_early),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in a JSON value."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    for key in keys:
        yield value, key
        yield from places(value[key])


# ---------------------------------------------------------------- to the wire


async def status_of(host: str, port: int, raw: bytes) -> int | None:
    """Send it, and read the status of the answer; None if the connection ends without one."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(raw)
        async with asyncio.timeout(ANSWER_S):
            line = await reader.readline()
        found = re.match(rb"HTTP/1\.[01] (\d{3}) ", line)
        return int(found[1]) if found else None
    except (TimeoutError, OSError):
        return None
    finally:
        writer.close()
