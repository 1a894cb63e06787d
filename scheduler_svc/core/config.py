"""The numbers that shape every decision of the core, and what is allowed for each."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

PolicyName = Literal["fcfs", "priority", "sjf", "deadline"]
PreemptionMode = Literal["auto", "swap", "recompute"]
VictimRule = Literal["newest", "cheapest"]
DeadlineAction = Literal["refuse", "end", "ignore"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a worker, the same for all workers of the pool.

    ValueError names the field that cannot be as it is.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    long_prefill_token_threshold: int = 0  # most tokens of a prompt in a step; 0: half the rest
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    reserve_full_prompt: bool = True  # admit only what fits with all its known tokens
    watermark: float = 0.0  # share of the blocks that an admission leaves free
    reserved_blocks: int = 0  # blocks that only the system class may be admitted to
    policy: PolicyName = "fcfs"
    priority_ageing_s: float = 0.0  # waiting that makes up for one level of priority; 0: never
    queue_timeout_s: float = 0.0  # longest wait for the first step; 0: for ever
    deadline_action: DeadlineAction = "end"
    preemption_mode: PreemptionMode = "recompute"
    preemption_victim: VictimRule = "newest"
    max_worker_losses: int = 3  # a request that alone was running at so many is ended
    version: int = 0  # of these settings; every step names the one it was planned with

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must be from 1 to max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running request needs a token a step"
            )
        _at_least_zero(
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            reserved_blocks=self.reserved_blocks,
            priority_ageing_s=self.priority_ageing_s,
            queue_timeout_s=self.queue_timeout_s,
        )
        if self.max_worker_losses < 1:
            raise ValueError(f"max_worker_losses ({self.max_worker_losses}) must be at least 1")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark ({self.watermark}) must be from 0 to below 1")
        _one_of(PolicyName, policy=self.policy)
        _one_of(DeadlineAction, deadline_action=self.deadline_action)
        _one_of(PreemptionMode, preemption_mode=self.preemption_mode)
        _one_of(VictimRule, preemption_victim=self.preemption_victim)


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """What one worker registered."""

    num_blocks: int
    block_size: int
    max_model_len: int
    num_cpu_blocks: int = 0

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1")
        _at_least_zero(num_cpu_blocks=self.num_cpu_blocks)

    @property
    def max_num_tokens(self) -> int:
        """Longest sequence, prompt and output, that fits alone.

        The last token of an output is never computed, so it needs no room in a block.
        """
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


def _at_least_zero(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < inf:
            raise ValueError(f"{name} ({value}) must be a number from 0 on")


def _one_of(allowed: object, **values: str) -> None:
    for name, value in values.items():
        if value not in get_args(allowed):
            raise ValueError(f"{name} ({value}) must be one of {', '.join(get_args(allowed))}")
