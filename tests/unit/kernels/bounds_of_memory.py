"""Kernels where a wrong address is a segmentation fault: a process of its own, for that reason.

`large_pool`: a pool of more than 2^31 numbers, which an offset of 32 bits would leave. It is
virtual memory, all but a few blocks of which is never touched.
`edge_of_memory`: operands whose last number is the last before a page that cannot be read.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.fakes import triton_interpreter

triton_interpreter.install()  # before kernels are imported

from kernels import reference  # noqa: E402 - see above
from kernels.copy_blocks import copy_blocks  # noqa: E402
from kernels.decode_attention import attend_decodes  # noqa: E402
from kernels.decode_plan import plan_decodes  # noqa: E402
from kernels.draw import Draw  # noqa: E402
from kernels.head_norms import HeadNorms  # noqa: E402
from kernels.heuristics import DecodeConfig, PrefillConfig  # noqa: E402
from kernels.paged_cache import PagedCache  # noqa: E402
from kernels.prefill_attention import attend_ragged  # noqa: E402
from kernels.reshape_and_cache import reshape_and_cache  # noqa: E402
from kernels.residual_rmsnorm import residual_rmsnorm  # noqa: E402
from kernels.rotary_and_cache import rotary_and_cache  # noqa: E402
from kernels.sampling import sample  # noqa: E402
from kernels.silu_mul import silu_mul  # noqa: E402

DIM = 64
NUMBERS_PER_BLOCK = 16 * DIM
LAST = 2**31 // NUMBERS_PER_BLOCK + 7  # begins beyond 2^31 numbers
DECODE, PREFILL = DecodeConfig(64), PrefillConfig(64, 64, 4, 2)


def large_pool() -> None:
    """Every kernel that sees a pool."""
    pools = [torch.empty(LAST + 1, 1, 16, DIM, dtype=torch.bfloat16) for _ in range(2)]
    cache = PagedCache(pools[0], pools[1])
    length = 20
    positions = torch.arange(length)
    blocks = torch.tensor([[LAST, LAST - 2]], dtype=torch.int32)
    slots = blocks[0].long()[positions // 16] * 16 + positions % 16
    key, value = torch.randn(2, length, 1, DIM).to(torch.bfloat16)

    reshape_and_cache(key, value, cache, slots)
    assert torch.equal(cache.key[LAST, 0], key[:16, 0])
    assert torch.equal(cache.value[LAST - 2, 0, :4], value[16:, 0])

    identity = torch.cat((torch.ones(length, DIM // 2), torch.zeros(length, DIM // 2)), dim=1)
    rotary_and_cache(value, value, key, cache, positions, slots, identity)
    assert torch.equal(cache.key[LAST, 0], value[:16, 0])

    attend_both_ways(torch.randn(length, 2, DIM).to(torch.bfloat16), cache, blocks, length)

    copy_blocks(pools[0], pools[1], torch.tensor([[LAST, LAST - 1]]))
    assert torch.equal(pools[1][LAST - 1], pools[0][LAST])


def edge_of_memory() -> None:
    """Every kernel; sizes that fill no tile."""
    pools = [at_the_edge(torch.randn(2, 1, 16, 80).to(torch.bfloat16)) for _ in range(2)]
    cache = PagedCache(pools[0], pools[1])
    blocks = at_the_edge(torch.tensor([[0, 1]], dtype=torch.int32))
    query = at_the_edge(torch.randn(19, 3, 80).to(torch.bfloat16))
    attend_both_ways(query, cache, blocks, 19)

    heads = at_the_edge(torch.randn(3, 1, 80).to(torch.bfloat16))
    slots, positions = at_the_edge(torch.tensor([31, -1, 4])), at_the_edge(torch.tensor([1, 0, 1]))
    reshape_and_cache(heads, heads, cache, slots)
    cos_sin, weight = at_the_edge(torch.randn(2, 80)), at_the_edge(heads[0, 0])
    for norms in (None, HeadNorms(weight, weight, 1e-5)):
        operands = (heads, heads, heads, cache, positions, slots, cos_sin)
        rotary_and_cache(*operands, norms=norms, out=heads)
    copy_blocks(pools[0], pools[1], at_the_edge(torch.tensor([[1, 1]])))

    rows = at_the_edge(torch.randn(2, 72))
    residual_rmsnorm(rows, at_the_edge(rows), at_the_edge(rows[0]), 1e-5)
    silu_mul(rows)

    columns: list[Any] = [torch.ones(2), torch.ones(2).int(), torch.ones(2) * 0.9, torch.zeros(2)]
    keys = torch.ones(2, 2, dtype=torch.int32)
    how = Draw(*(at_the_edge(column) for column in (*columns, keys)))
    sample(at_the_edge(torch.randn(2, 99)), how, block=64)


def attend_both_ways(query: Tensor, cache: PagedCache, blocks: Tensor, length: int) -> None:
    """One sequence, all of which is queries; then its last token alone."""
    starts = torch.tensor([0, length], dtype=torch.int32)
    lens = torch.tensor([length], dtype=torch.int32)
    expected = reference.attend(query, cache, blocks, starts, lens, scale=0.1)
    operands = (query, cache, blocks, at_the_edge(starts), at_the_edge(lens))
    ragged = attend_ragged(*operands, scale=0.1, config=PREFILL)
    torch.testing.assert_close(ragged, expected, atol=2e-2, rtol=0)
    plan = plan_decodes(np.array([length]), query.device)
    single = at_the_edge(query[-1:])
    decoded = attend_decodes(single, cache, blocks, plan, scale=0.1, config=DECODE)
    torch.testing.assert_close(decoded, expected[-1:], atol=2e-2, rtol=0)


_kept: list[Any] = []  # memory that tensors point to


def at_the_edge(tensor: Tensor) -> Tensor:
    """A copy, behind which there is no memory."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    guard = ctypes.c_void_p(begin + pages * mmap.PAGESIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = torch.frombuffer(
        memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages * mmap.PAGESIZE - size
    )
    _kept.append(memory)
    return copy.view(tensor.shape).copy_(tensor)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
