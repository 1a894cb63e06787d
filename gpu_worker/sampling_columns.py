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
        # By row, of those that want log-probabilities: of how many tokens besides its own.
        self.num_logprobs: dict[int, int] = {}
        self.num_prompt_logprobs: dict[int, int] = {}

    def fill(self, row: int, new: NewRequestData) -> None:
        """Take over a request's parameters; the row is new, or was forgotten."""
        sampling = new.sampling
        self.temperature[row] = sampling.temperature
        self.top_k[row] = min(max(sampling.top_k, 0), 2**31)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed % 2**64
        if sampling.logprobs is not None:
            self.num_logprobs[row] = max(sampling.logprobs, 0)
        if sampling.prompt_logprobs is not None:
            self.num_prompt_logprobs[row] = max(sampling.prompt_logprobs, 0)

    def forget(self, row: int) -> None:
        """The request of a row has left."""
        self.num_logprobs.pop(row, None)
        self.num_prompt_logprobs.pop(row, None)
