"""How rows of logits become tokens: the columns that sampling reads, with their shapes.

Values only. `kernels.sampling` and `kernels.reference` do what they say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged_cache import INDICES, check


@dataclass(frozen=True, slots=True)
class Draw:
    """How each of N rows draws. Filters in this order: temperature, top-k, min-p, then top-p."""

    temperature: Tensor  # (N,) float32; 0 is greedy
    top_k: Tensor  # (N,) int; 0, or as many as there are tokens, is off
    top_p: Tensor  # (N,) float32; 1 is off
    min_p: Tensor  # (N,) float32; 0 is off
    keys: Tensor  # (N, 2) int32: multiplier and offset of the row's noise

    def check(self, num_rows: int, device: torch.device) -> None:
        """Raise ValueError unless these are columns of N rows."""
        for name in ("temperature", "top_p", "min_p"):
            check(name, getattr(self, name), (num_rows,), (torch.float32,), device)
        check("top_k", self.top_k, (num_rows,), INDICES, device)
        check("keys", self.keys, (num_rows, 2), (torch.int32,), device)
        if not self.keys.is_contiguous():
            raise ValueError("keys are not contiguous")


@dataclass(frozen=True, slots=True)
class Penalties:
    """What is taken from the logits of tokens that were there before, for N rows.

    A repeated token's logit is divided by `repetition` if above 0, else multiplied by it; then
    `frequency` times its count, and once `presence`, are subtracted. The first looks at prompt and
    output, the others at the output. Counts are kept for the R requests that need them, no more.
    """

    slots: Tensor  # (N,) int32: which of the R; below 0: nothing is taken
    repetition: Tensor  # (N,) float32; 1 is off
    frequency: Tensor  # (N,) float32
    presence: Tensor  # (N,) float32
    counts: Tensor  # (R, V) int32: how often the output has a token
    in_prompt: Tensor  # (R, ceil(V / 32)) int32: bit t % 32 of word t // 32 says so of token t

    def check(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Raise ValueError unless these are columns of N rows and V tokens."""
        check("slots", self.slots, (num_rows,), (torch.int32,), device)
        for name in ("repetition", "frequency", "presence"):
            check(name, getattr(self, name), (num_rows,), (torch.float32,), device)
        check("counts", self.counts, (None, vocab_size), (torch.int32,), device)
        num_words = -(-vocab_size // 32)
        check("in_prompt", self.in_prompt, (None, num_words), (torch.int32,), device)
