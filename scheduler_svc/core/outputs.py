"""What comes out of the core beside steps: tokens, starts, ends, totals. Values only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from wire.messages import ErrorCode, FinishReason, RequestLogprobs

PreemptionMode = Literal["swap", "recompute"]
"""What becomes of the blocks: copied to the CPU pool, or given up."""

PreemptionReason = Literal["memory", "urgency", "fairness", "worker_lost", "mistrust"]
"""Blocks ran out; somebody more urgent, or of a tenant served less, took its place; or a loss."""


@dataclass(frozen=True, slots=True)
class Started:
    """A request was scheduled for the first time."""

    req: int
    num_cached_tokens: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of a request."""

    req: int
    num_output_tokens: int
    finish_reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None
    error_code: ErrorCode | None = None
    num_preemptions: int = 0
    preempted_s: float = 0.0  # that it waited after preemptions, in all


@dataclass(slots=True)
class Outputs:
    """All that happened since the last `take_outputs`. The first three: a row a token."""

    reqs: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # output index of the token
    token_ids: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: list[RequestLogprobs] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reqs or self.started or self.finished or self.logprobs)


@dataclass(slots=True)
class Totals:
    """Counters since this scheduler took the lead."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    preemptions: Counter[tuple[PreemptionMode, PreemptionReason]] = field(default_factory=Counter)
    num_swaps: int = 0  # preemptions that kept the blocks
    num_swapped_blocks: int = 0  # copied, in either direction
    num_recomputed_tokens: int = 0  # computed before, lost, and to be computed again
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    num_corrupted: int = 0  # requests that a worker could not compute: NaN, no memory
    num_ignored: int = 0  # events that did not fit the state

    @property
    def num_preemptions(self) -> int:
        """Preemptions of any kind."""
        return self.preemptions.total()
