"""The gated activation of a Llama-like model: silu(gate) * up, gates and ups in one matrix."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.paged_cache import FLOATS, check, check_rows
from kernels.target import can_launch

_BLOCK = 1024


@triton.jit
def _silu_mul(
    out_ptr: tl.tensor,  # (T, N)
    gate_up_ptr: tl.tensor,  # (T, 2 N)
    stride_out: tl.int64,
    stride_gate_up: tl.int64,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = at < N
    gate = tl.load(gate_up_ptr + row * stride_gate_up + at, mask=is_real, other=0.0)
    up = tl.load(gate_up_ptr + row * stride_gate_up + N + at, mask=is_real, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)  # rounded, as without fusion
    tl.store(out_ptr + row * stride_out + at, activated * up, mask=is_real)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (T, N) of gate_up (T, 2 N), the gates first.

    Raises ValueError for operands that do not fit.
    """
    check("gate_up", gate_up, (None, None), FLOATS)
    check_rows("gate_up", gate_up)
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns, not as many gates as ups")
    if not can_launch(gate_up):
        return reference.silu_mul(gate_up)
    out = gate_up.new_empty(num_rows, size)
    if num_rows:
        _silu_mul[(num_rows, triton.cdiv(size, _BLOCK))](
            out,
            gate_up,
            out.stride(0),
            gate_up.stride(0),
            N=size,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out
