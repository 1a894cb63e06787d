"""The numbers that shape every decision of the core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of a worker, the same for all workers of the pool."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    long_prefill_token_threshold: int = 0  # 0: no limit
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    reserve_full_prompt: bool = True  # admit only what fits with all its known tokens

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must be from 1 to max_num_batched_tokens "
                f"({self.max_num_batched_tokens}): every running request needs a token a step"
            )
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) must not be "
                "negative"
            )


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """What one worker registered."""

    num_blocks: int
    block_size: int
    max_model_len: int

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.block_size, self.max_model_len) < 1:
            raise ValueError(f"a worker needs at least one block of one token, got {self}")

    @property
    def max_num_tokens(self) -> int:
        """Longest sequence, prompt and output, that fits alone.

        The last token of an output is never computed, so it needs no room in a block.
        """
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)
