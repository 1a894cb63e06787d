"""Norms of single heads before they are rotated, as Qwen3 has them. Values only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.paged_cache import check


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Root-mean-square norms of query heads and of key heads."""

    query: Tensor  # (DK,)
    key: Tensor  # (DK,)
    eps: float

    def check(self, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raise ValueError unless these are weights of heads of `dim` numbers."""
        for name, weight in (("query norm", self.query), ("key norm", self.key)):
            check(name, weight, (dim,), (dtype,), device)
