"""Log-probabilities of tokens as bytes: what a worker measures and a gateway shows.

A record is one token's, little endian, with k alternatives; all of a request have the same k:

    rank: u32, then k + 1 times (token id: u32, log-probability: f32)

First the token itself, whose rank is 1 if it was the most likely; then the k most likely tokens,
falling. Whoever is between the two ends passes records on unread.
"""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_PREFIX = "logprobs:"


@dataclass(frozen=True, slots=True)
class LogprobRecord:
    """One token, and the most likely ones in its place."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def record_size(num_top: int) -> int:
    """Bytes of a record with so many alternatives."""
    return 4 + 8 * (num_top + 1)


def read_records(records: bytes, num_top: int) -> Iterator[LogprobRecord]:
    """Read records that lie one behind the other. ValueError if these are none."""
    size = record_size(num_top)
    if len(records) % size:
        raise ValueError(f"{len(records)} bytes are no records of {size}")
    for rank, *pairs in struct.iter_unpack(f"<I{'If' * (num_top + 1)}", records):
        columns = tuple(zip(pairs[::2], pairs[1::2], strict=True))
        yield LogprobRecord(*columns[0], rank, columns[1:])


# ---------------------------------------------------------------- in the hash of a request


def stored(start: int, records: bytes) -> dict[str, str]:
    """Write records, the first of output token `start`, as a field of a hash."""
    return {f"{_PREFIX}{start}": b64encode(records).decode()}


def stored_in(fields: Mapping[str, str]) -> Iterator[tuple[int, bytes]]:
    """Read what `stored` wrote: start and records. ValueError for what it did not."""
    for name, value in fields.items():
        if name.startswith(_PREFIX):
            yield int(name.removeprefix(_PREFIX)), b64decode(value, validate=True)
