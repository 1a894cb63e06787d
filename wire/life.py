"""The life of a request as one line of text in Redis, for people with `redis-cli` and the console.

    worker=w1 priority=0 prompt=120 output=45 preemptions=1 arrival_ms=1760000000000
    phases=waiting:0,prefill:12,decode:40,swapped:300,decode:900 tenant=default

Phases say when they began, in milliseconds after the arrival. Nothing relies on it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_NUMBERS = ("priority", "prompt", "output", "preemptions", "arrival_ms")
_PHASES = re.compile(r"[a-z]{1,16}:\d{1,15}(,[a-z]{1,16}:\d{1,15}){0,63}")
_NAME = re.compile(r"[^\s\x00-\x1f]{0,128}")


@dataclass(frozen=True, slots=True)
class LifeLine:
    """What a request went through so far."""

    tenant: str
    worker: str  # where it runs or ran last; empty: nowhere yet
    priority: int
    prompt: int  # tokens
    output: int  # tokens, as far as known
    preemptions: int
    arrival_ms: int  # the Redis server's clock
    phases: str

    def text(self) -> str:
        """The line; ValueError if it could not be read again."""
        if not (_NAME.fullmatch(self.tenant) and _NAME.fullmatch(self.worker)):
            raise ValueError("a name with a space in it")
        return (
            f"worker={self.worker} priority={self.priority} prompt={self.prompt} "
            f"output={self.output} preemptions={self.preemptions} arrival_ms={self.arrival_ms} "
            f"phases={self.phases} tenant={self.tenant}"
        )

    @classmethod
    def read(cls, text: str) -> LifeLine:
        """Inverse of `text`. ValueError if this is no such line."""
        found = dict(pair.partition("=")[::2] for pair in text.split(" "))
        try:
            numbers = {name: int(found[name]) for name in _NUMBERS}
            tenant, worker, phases = found["tenant"], found["worker"], found["phases"]
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from None
        if not _PHASES.fullmatch(phases):
            raise ValueError("its phases make no sense")
        return cls(tenant=tenant, worker=worker, phases=phases, **numbers)
