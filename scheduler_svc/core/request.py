"""One request as the scheduler knows it, and its legal states.

Owns the tokens and the place of a request. Never decides where it goes next.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from scheduler_svc.core.life import Life
from scheduler_svc.core.tenants import Tenant
from wire.messages import SYSTEM_PRIORITY, EngineCoreRequest, SamplingParams

Order = tuple[int, int, int]
"""Class, rank and number: the one total order, lower first."""


class RequestStatus(Enum):
    """Where a request is.

        WAITING ──> PREFILLING ──> DECODING ──> ENDING ──> FINISHED
           ^  ^          │             │           │
           │  └ SWAPPED <┴─ preempted ─┤           │       (FINISHED from anywhere)
           └──────────── or worker lost┴───────────┘

    PREFILLING: more than its last known token is still to be computed. DECODING: only that one is;
    it is in the decode batch. ENDING: the step that samples its last token is on its way. SWAPPED:
    like WAITING, but its blocks are in the CPU pool of its worker, and there it goes on.
    """

    WAITING = auto()
    SWAPPED = auto()
    PREFILLING = auto()
    DECODING = auto()
    ENDING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A sequence to be generated.

    While it is DECODING nothing here changes when a step is scheduled. The token that step `k`
    computes has position `decode_base + k`.
    """

    num: int  # request number, also its place in the order of arrival
    req_id: str
    token_ids: array[int]  # prompt, then output as far as it is known
    num_prompt_tokens: int
    sampling: SamplingParams
    arrival: float  # seconds, server time
    tenant: Tenant
    priority: int = 0
    deadline: float | None = None  # seconds, server time
    cache_salt: str | None = None
    traceparent: str | None = None  # handed on, and no part of any decision

    order: Order = (0, 0, 0)
    status: RequestStatus = RequestStatus.WAITING
    worker: str | None = None  # where it runs, or ran before it was preempted
    resume_after: int = 0  # step of `worker` whose result must be in before it runs again
    num_preemptions: int = 0
    preempted_at: float | None = None  # and it has not run since; seconds, server time
    preempted_s: float = 0.0  # that it waited after preemptions before
    num_losses: int = 0  # workers lost in a row while it ran on them and got no further
    num_lone_losses: int = 0  # of those, while it ran alone
    num_tokens_at_loss: int = 0
    was_started: bool = False
    has_hits: bool = False  # some of its blocks were computed for others
    has_started_over: bool = False  # since those may have been wrong
    promised_to: str | None = None  # worker that may take it before others do

    block_ids: list[int] = field(default_factory=list)
    cpu_block_ids: list[int] = field(default_factory=list)  # while SWAPPED
    block_hashes: list[bytes] = field(default_factory=list)  # of full blocks, as far as computed
    num_published_blocks: int = 0
    num_computed_tokens: int = 0  # as scheduled; stands still while DECODING
    max_num_tokens: int = 0  # length at which it ends, set when it is admitted

    decode_base: int = 0
    decode_index: int = -1  # place in the decode batch, -1: none
    leave_step: int = 0  # first step it takes no part in, unless it ends earlier

    stop_ids: frozenset[int] = field(init=False)
    life: Life = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens_at_loss = len(self.token_ids)
        self.life = Life(self.arrival)
        self.stop_ids = frozenset(self.sampling.eos_token_ids + self.sampling.stop_token_ids)

    @classmethod
    def of(cls, num: int, request: EngineCoreRequest, arrival: float, tenant: Tenant) -> Request:
        """Begin the bookkeeping of an accepted request."""
        deadline = None
        if request.deadline_ms is not None:
            deadline = arrival + request.deadline_ms / 1000
        return cls(
            num=num,
            req_id=request.req_id,
            token_ids=request.prompt_token_ids + request.output_token_ids,
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=request.sampling,
            arrival=arrival,
            tenant=tenant,
            priority=request.priority,
            deadline=deadline,
            cache_salt=request.cache_salt,
            traceparent=request.traceparent,
            order=(0, 0, num),
        )

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what kills workers: from now on it runs alone, to clear the others."""
        return self.num_losses >= 2

    def run_again(self, now: float) -> None:
        """Note that it does not wait any more after a preemption."""
        assert self.preempted_at is not None
        self.preempted_s += max(0.0, now - self.preempted_at)
        self.preempted_at = None

    def blame(self, *, was_alone: bool) -> None:
        """A worker was lost while this ran on it. That counts only if it got no further since."""
        if self.num_tokens > self.num_tokens_at_loss:
            self.num_losses = self.num_lone_losses = 0
        else:
            self.num_losses += 1
            self.num_lone_losses += was_alone
        self.num_tokens_at_loss = self.num_tokens

    @property
    def is_system(self) -> bool:
        """Whether it belongs to the class that goes before all others."""
        return self.priority <= SYSTEM_PRIORITY

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and reported output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> array[int]:
        """A copy of the prompt."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> array[int]:
        """A copy of the output known so far."""
        return self.token_ids[self.num_prompt_tokens :]


def problem_of(request: EngineCoreRequest) -> str | None:
    """Say what no scheduler could do with a request; None if it makes sense."""
    if not request.prompt_token_ids:
        return "the prompt has no tokens"
    if not 0 < request.weight < inf:
        return f"the tenant's weight ({request.weight:g}) must be above 0"
    return None
