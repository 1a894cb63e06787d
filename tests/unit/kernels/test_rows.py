"""The operations between attention and the matrix products, against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.residual_rmsnorm import residual_rmsnorm
from kernels.silu_mul import silu_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("size", [64, 576, 2048])
def test_rmsnorm_is_the_reference(dtype: torch.dtype, has_residual: bool, size: int) -> None:
    hidden = torch.randn(3, size).to(dtype)
    residual = torch.randn(3, size).to(dtype) if has_residual else None
    weight = torch.randn(size).to(dtype)
    expected, total = reference.residual_rmsnorm(hidden, residual, weight, 1e-5)
    actual = residual_rmsnorm(hidden, residual, weight, 1e-5)
    # The order of the sum differs, so a number may fall on the other side of a rounding.
    torch.testing.assert_close(actual, expected)
    if residual is not None:
        assert torch.equal(residual, total)


def test_rmsnorm_of_a_row_is_the_same_in_any_batch_bit_by_bit() -> None:
    hidden, weight = torch.randn(5, 576), torch.randn(576)
    together = residual_rmsnorm(hidden, None, weight, 1e-5)
    assert torch.equal(residual_rmsnorm(hidden[3:4], None, weight, 1e-5)[0], together[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 1536])
def test_silu_mul_is_the_reference(dtype: torch.dtype, size: int) -> None:
    gate_up = torch.randn(3, 2 * size).to(dtype) * 4
    torch.testing.assert_close(silu_mul(gate_up), reference.silu_mul(gate_up))
