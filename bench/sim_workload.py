"""Who asks for what, and when: streams of requests, drawn from a seed.

Owns arrival times, lengths and shared prefixes. Knows no scheduler.
"""

from __future__ import annotations

import bisect
import itertools
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

VOCABULARY = 30_000
END = 1
"""The token that ends an answer."""


@dataclass(frozen=True, slots=True)
class Zipf:
    """Lengths from `low` to `high` tokens, where one of n times the least is n**-s as frequent."""

    low: int
    high: int
    s: float = 1.1
    steps: int = 64  # different lengths that occur

    def draw(self, draw: random.Random) -> int:
        shares = _shares(self.s, self.steps)
        rank = bisect.bisect(shares, draw.random() * shares[-1])
        span = (self.high - self.low) / max(1, self.steps - 1)
        return round(self.low + min(rank, self.steps - 1) * span)

    @property
    def mean(self) -> float:
        shares = _shares(self.s, self.steps)
        span = (self.high - self.low) / max(1, self.steps - 1)
        ranks = sum(
            rank * (high - low) for rank, (low, high) in enumerate(itertools.pairwise((0, *shares)))
        )
        return self.low + span * ranks / shares[-1]


@lru_cache
def _shares(s: float, steps: int) -> tuple[float, ...]:
    """Cumulated frequencies of the ranks."""
    return tuple(itertools.accumulate((rank + 1) ** -s for rank in range(steps)))


@dataclass(frozen=True, slots=True)
class Stream:
    """The requests of one tenant."""

    tenant: str
    rate: float  # requests a second
    prompt: Zipf = Zipf(32, 1024)
    answer: Zipf = Zipf(16, 256)
    arrivals: Literal["poisson", "bursts"] = "poisson"
    weight: float = 1.0
    priority: int = 0
    deadline_ms: int | None = None
    num_prefixes: int = 0  # system prompts that its requests begin with, one of them each
    prefix_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Job:
    """One request, and how it will go."""

    at: float  # seconds
    stream: Stream
    prompt: array[int]
    max_tokens: int
    answer_length: int

    def token(self, num: int, index: int) -> int:
        """Output token `index` of the request with this number."""
        if index + 1 == self.answer_length:
            return END
        return 2 + (num * 7919 + index) % (VOCABULARY - 2)


def jobs_of(streams: list[Stream], seconds: float, seed: int) -> list[Job]:
    """All requests of some streams in order of arrival. A stream's do not depend on the others."""
    jobs: list[Job] = []
    for stream in streams:
        draw = random.Random(f"{seed} {stream.tenant}")
        prefixes = [_tokens(draw, stream.prefix_tokens) for _ in range(stream.num_prefixes)]
        for at in _arrivals(draw, stream, seconds):
            prompt = _tokens(draw, stream.prompt.draw(draw))
            if prefixes:
                prompt = draw.choice(prefixes) + prompt
            jobs.append(Job(at, stream, prompt, 2 * stream.answer.high, stream.answer.draw(draw)))
    return sorted(jobs, key=lambda job: job.at)


def _arrivals(draw: random.Random, stream: Stream, seconds: float) -> Iterator[float]:
    """Poisson; in bursts the same mean, but all within one second of five."""
    at = 0.0
    while True:
        if stream.arrivals == "poisson":
            at += draw.expovariate(stream.rate)
        else:
            at += draw.expovariate(5 * stream.rate)
            if at % 5 > 1:
                at += 5 - at % 5
        if at >= seconds:
            return
        yield at


def _tokens(draw: random.Random, count: int) -> array[int]:
    return array("I", draw.choices(range(2, VOCABULARY), k=count))
