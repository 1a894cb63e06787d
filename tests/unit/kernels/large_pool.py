"""Kernels on a pool of more than 2^31 numbers: an offset of 32 bits would leave it.

A process of its own, since that is a segmentation fault. The memory is virtual: all but a few
blocks of it is never touched.
"""

from __future__ import annotations

import numpy as np
import torch

from tests.fakes import triton_interpreter

triton_interpreter.install()  # before kernels are imported

from kernels import reference  # noqa: E402 - see above
from kernels.copy_blocks import copy_blocks  # noqa: E402
from kernels.decode_attention import attend_decodes, plan_decodes  # noqa: E402
from kernels.heuristics import DecodeConfig, PrefillConfig  # noqa: E402
from kernels.paged_cache import PagedCache  # noqa: E402
from kernels.prefill_attention import attend_ragged  # noqa: E402
from kernels.reshape_and_cache import reshape_and_cache  # noqa: E402
from kernels.rotary_and_cache import rotary_and_cache  # noqa: E402

DIM = 64
NUMBERS_PER_BLOCK = 16 * DIM
LAST = 2**31 // NUMBERS_PER_BLOCK + 7  # begins beyond 2^31 numbers


def main() -> None:
    """Fail, or crash, where an offset does not fit."""
    pools = [torch.empty(LAST + 1, 1, 16, DIM, dtype=torch.bfloat16) for _ in range(2)]
    cache = PagedCache(*pools)
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

    query = torch.randn(length, 2, DIM).to(torch.bfloat16)
    starts = torch.tensor([0, length], dtype=torch.int32)
    lens = torch.tensor([length], dtype=torch.int32)
    expected = reference.attend(query, cache, blocks, starts, lens, scale=0.1)
    ragged = attend_ragged(
        query, cache, blocks, starts, lens, scale=0.1, config=PrefillConfig(64, 64, 4, 2)
    )
    torch.testing.assert_close(ragged, expected, atol=2e-2, rtol=0)
    plan = plan_decodes(np.array([length]), query.device)
    decoded = attend_decodes(query[-1:], cache, blocks, plan, scale=0.1, config=DecodeConfig(64))
    torch.testing.assert_close(decoded, expected[-1:], atol=2e-2, rtol=0)

    copy_blocks(pools[0], pools[1], torch.tensor([[LAST, LAST - 1]]))
    assert torch.equal(pools[1][LAST - 1], pools[0][LAST])


if __name__ == "__main__":
    main()
