"""Residual addition and root-mean-square normalisation in one pass over the hidden states.

One program a row, whatever the batch: a row's result is the same in any.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.paged_cache import FLOATS, check, check_rows
from kernels.target import can_launch

_LARGEST_ROW = 32768  # numbers that one program holds


@triton.jit
def _residual_rmsnorm(
    out_ptr: tl.tensor,  # (T, N)
    hidden_ptr: tl.tensor,  # (T, N)
    residual_ptr: tl.tensor,  # (T, N) or None
    weight_ptr: tl.tensor,  # (N,)
    eps: tl.tensor,
    stride_out: tl.int64,
    stride_hidden: tl.int64,
    stride_residual: tl.int64,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Normalise one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    is_real = at < N
    total = tl.load(hidden_ptr + row * stride_hidden + at, mask=is_real, other=0.0)
    kind = total.dtype
    if residual_ptr is not None:
        place = residual_ptr + row * stride_residual + at
        residual = tl.load(place, mask=is_real, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + residual).to(kind)  # rounded before it is squared
        tl.store(place, total, mask=is_real)
    wide = total.to(tl.float32)
    normal = wide * tl.rsqrt(tl.sum(wide * wide, 0) / N + eps)
    weight = tl.load(weight_ptr + at, mask=is_real, other=0.0)
    tl.store(out_ptr + row * stride_out + at, weight * normal.to(kind), mask=is_real)


def residual_rmsnorm(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Normalise hidden + residual (T, N), weighted by (N,); the residual becomes their sum.

    Without a residual, normalise hidden (T, N). Raises ValueError for operands that do not fit.
    """
    num_rows, size = hidden.shape
    check("hidden", hidden, (None, None), FLOATS)
    check("weight", weight, (size,), (hidden.dtype,), hidden.device)
    check_rows("hidden", hidden)
    if residual is not None:
        check("residual", residual, (num_rows, size), (hidden.dtype,), hidden.device)
        check_rows("residual", residual)
    if size > _LARGEST_ROW:
        raise ValueError(f"rows of {size} numbers: {_LARGEST_ROW} is the most")
    if not can_launch(hidden):
        normal, total = reference.residual_rmsnorm(hidden, residual, weight, eps)
        if residual is not None:
            residual.copy_(total)
        return normal
    out = hidden.new_empty(num_rows, size)
    if not num_rows:
        return out
    block = triton.next_power_of_2(size)
    _residual_rmsnorm[(num_rows,)](
        out,
        hidden,
        residual,
        weight,
        eps,
        out.stride(0),
        hidden.stride(0),
        0 if residual is None else residual.stride(0),
        N=size,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        enable_fp_fusion=True,
    )
    return out
