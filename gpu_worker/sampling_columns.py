"""How each of a worker's rows samples, by column.

Owns the form in which the parameters of requests are kept. Draws nothing.
"""

from __future__ import annotations

import numpy as np

from wire.messages import NewRequestData


class SamplingColumns:
    """How each row samples; filled when a request arrives."""

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows, dtype=np.float32)  # 0: greedy
        self.top_k = np.zeros(num_rows, dtype=np.int64)  # 0: off
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        self.num_logprobs = np.full(num_rows, -1, dtype=np.int64)  # -1: none are wanted
        self.num_prompt_logprobs = np.full(num_rows, -1, dtype=np.int64)

    def fill(self, row: int, new: NewRequestData) -> None:
        """Take over a request's parameters."""
        sampling = new.sampling
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(max(sampling.top_k, 0), 2**31)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed % 2**64
        self.num_logprobs[row] = _count(sampling.logprobs)
        self.num_prompt_logprobs[row] = _count(sampling.prompt_logprobs)


def _count(num_logprobs: int | None) -> int:
    return -1 if num_logprobs is None else max(num_logprobs, 0)
