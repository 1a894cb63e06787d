"""The interpreter does what a GPU does with few bits: without this no test here means anything."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.fakes.triton_interpreter import FLOAT8

NUMBERS = [0.0, 1.0, -1.00390625, 3.1415927, 1e-3, -7e4, 1e6, 0.30000001, 447.0, 65504.0]
NARROW = [torch.bfloat16, *FLOAT8]


@triton.jit
def _arithmetic(
    out_ptr: tl.tensor, left_ptr: tl.tensor, right_ptr: tl.tensor, size: tl.constexpr
) -> None:
    at = tl.arange(0, size)
    left, right = tl.load(left_ptr + at), tl.load(right_ptr + at)
    tl.store(out_ptr + at, left + right)
    tl.store(out_ptr + size + at, left * right)
    tl.store(out_ptr + 2 * size + at, tl.where(left > right, left, -right))


@triton.jit
def _convert(out_ptr: tl.tensor, numbers_ptr: tl.tensor, size: tl.constexpr) -> None:
    at = tl.arange(0, size)
    tl.store(out_ptr + at, tl.load(numbers_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def _multiply(
    out_ptr: tl.tensor, left_ptr: tl.tensor, right_ptr: tl.tensor, size: tl.constexpr
) -> None:
    rows, columns = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    left = tl.load(left_ptr + rows * size + columns)
    right = tl.load(right_ptr + rows * size + columns)
    tl.store(out_ptr + rows * size + columns, tl.dot(left, right))


def sixteen(dtype: torch.dtype) -> Tensor:
    return torch.cat((torch.tensor(NUMBERS), torch.randn(6))).to(dtype)


def test_no_process_that_a_test_starts_inherits_it() -> None:
    assert triton.knobs.runtime.interpret
    assert "TRITON_INTERPRET" not in os.environ


def test_bfloat16_arithmetic_rounds_like_torch() -> None:
    left, right = sixteen(torch.bfloat16), sixteen(torch.bfloat16).flip(0)
    out = torch.empty(48, dtype=torch.bfloat16)
    _arithmetic[(1,)](out, left, right, size=16)
    expected = torch.cat((left + right, left * right, torch.where(left > right, left, -right)))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", NARROW)
def test_conversions_round_like_torch(dtype: torch.dtype) -> None:
    numbers = sixteen(torch.float32)
    narrow = torch.empty(16, dtype=dtype)
    _convert[(1,)](narrow, numbers, size=16)
    largest = torch.finfo(dtype).max
    expected = numbers.clamp(-largest, largest).to(dtype)
    assert torch.equal(narrow.float(), expected.float())
    wide = torch.empty(16)
    _convert[(1,)](wide, narrow, size=16)
    assert torch.equal(wide, narrow.float())


@pytest.mark.parametrize("dtype", NARROW)
def test_products_are_those_of_the_numbers(dtype: torch.dtype) -> None:
    left, right = torch.randn(2, 16, 16).to(dtype)
    out = torch.empty(16, 16)
    _multiply[(1,)](out, left, right, size=16)
    torch.testing.assert_close(out, left.float() @ right.float())
