"""Whole blocks from pool to pool, as swapping needs it: bytes, whatever they mean."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import reference
from kernels.paged_cache import INDICES, check
from kernels.target import can_launch

_WORDS = 2048  # that one program copies


@triton.jit(do_not_specialize_on_alignment=["pairs_ptr"])
def _copy_blocks(
    source_ptr: tl.tensor,  # (NB, words) int32
    target_ptr: tl.tensor,  # (NB', words) int32
    pairs_ptr: tl.tensor,  # (N, 2)
    stride_source: tl.int64,
    stride_target: tl.int64,
    num_words: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Copy a part of one block."""
    pair = tl.program_id(0)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    is_real = at < num_words
    source = tl.load(pairs_ptr + pair * 2).to(tl.int64)
    target = tl.load(pairs_ptr + pair * 2 + 1).to(tl.int64)
    words = tl.load(source_ptr + source * stride_source + at, mask=is_real)
    tl.store(target_ptr + target * stride_target + at, words, mask=is_real)


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy block pairs[i, 0] of source (NB, …) to block pairs[i, 1] of target (NB', …).

    The copies are one set, without an order: no block may be a target twice, nor be a target and a
    source of the same pool. Pools on two devices are copied by torch. Raises ValueError for
    operands that do not fit.
    """
    check("pairs", pairs, (None, 2), INDICES)
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"blocks of {source[0].shape} {source.dtype} are to go where other blocks are"
        )
    if not source.is_contiguous() or not target.is_contiguous():
        raise ValueError("a block is not one stretch of memory")
    if not len(pairs):
        return
    devices = {source.device, target.device, pairs.device}
    if len(devices) > 1 or not can_launch(source):
        reference.copy_blocks(source, target, pairs)
        return
    source_words, target_words = (pool.flatten(1).view(torch.int32) for pool in (source, target))
    num_words = source_words.shape[1]
    _copy_blocks[(len(pairs), triton.cdiv(num_words, _WORDS))](
        source_words,
        target_words,
        pairs.contiguous(),
        source_words.stride(0),
        target_words.stride(0),
        num_words,
        WORDS=_WORDS,
        num_warps=4,
        enable_fp_fusion=True,
    )
