"""What a tenant may ask for in a minute, and what its requests count for.

Owns the words only: the token buckets live in Redis, and `wire/scripts/submit.lua` and
`commit.lua` draw from them and give back.
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.connection import BusError
from wire.messages import EngineCoreRequest


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of a tenant; 0 is none. A bucket holds a minute's worth and fills evenly."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0


UNLIMITED = Quota()


class QuotaError(BusError):
    """Admission was refused: the tenant has asked for too much in the last minute."""

    def __init__(self, what: str, wait_s: float) -> None:
        super().__init__(f"the tenant's {what} of this minute are used up")
        self.what = what  # requests or tokens
        self.wait_s = wait_s  # until the same would be admitted, if nobody else of the tenant asks


def num_tokens_at_most(request: EngineCoreRequest) -> int:
    """Tokens that a request counts for until it ends; what it did not generate is given back."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens
