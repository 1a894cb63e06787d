"""Triton's interpreter, made right for bfloat16 and float8: runs kernels where no GPU is.

As shipped it does bfloat16 and float8 arithmetic on the raw bits. Here their operands become
float32, the operation is done there, and the result is rounded to nearest even, as a GPU does;
what is too large for a float8 becomes its largest value.

`install` comes before any module of `kernels` is imported: a function is made for the interpreter
or for the compiler when it is decorated; only Triton's own are made anew. It sets no environment
variable, for a process that a test starts must not inherit it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
_IS_OLD = tuple(int(number) for number in triton.__version__.split(".")[:2]) < (3, 9)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""What this Triton's interpreter converts; those of AMD's GPUs it did not always."""
if not _IS_OLD:
    FLOAT8 = (*FLOAT8, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)

_COMPARISONS = {
    np.less,
    np.less_equal,
    np.greater,
    np.greater_equal,
    np.equal,
    np.not_equal,
}

Array = NDArray[Any]


def install() -> None:
    """Run kernels that are decorated from now on in the interpreter, with right arithmetic."""
    if triton.knobs.runtime.interpret:
        return
    if early := [name for name in sys.modules if name.startswith("kernels.") and _compiles(name)]:
        raise RuntimeError(f"{', '.join(early)} came before the interpreter: already compiled")
    propagates, triton.knobs.propagate_env = triton.knobs.propagate_env, False
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = propagates
    _interpret_library()
    interpreter._patch_lang(tl.standard.zeros.fn)  # what Triton's own functions see, once for all
    interpreter.InterpretedFunction.__call__ = _call_within_a_launch
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)  # slow
    _patch_builder(interpreter.InterpreterBuilder)
    _patch_sum(interpreter.ReduceOps)


def _compiles(module: str) -> bool:
    """Whether a module has functions that are made for the compiler already."""
    return any(isinstance(value, JITFunction) for value in vars(sys.modules[module]).values())


def _interpret_library() -> None:
    """Do to Triton's own functions in Triton, made at its import, what is done to ours from now."""
    interpreted: dict[int, Any] = {}
    for module in (tl, tl.standard, tl.random):
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                if id(function) not in interpreted:
                    interpreted[id(function)] = interpreter.InterpretedFunction(function.fn)
                setattr(module, name, interpreted[id(function)])


def _call_within_a_launch(self: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call a function from a kernel: the launch has prepared the language, so do it no more."""
    return self.rewrite()(*arguments, **keywords)


def _is_narrow(handle: Any) -> bool:
    return handle.dtype.scalar in _TORCH


def _widened(data: Array, dtype: tl.dtype) -> Array:
    """Bits of `dtype` as float32; anything else as it is."""
    if dtype not in _TORCH:
        return data
    bits = np.array(data, order="C", copy=True)
    bits = bits.view(np.uint8 if bits.itemsize == 1 else np.int16)
    numbers = torch.from_numpy(bits.reshape(-1)).view(_TORCH[dtype]).float()
    return numbers.numpy().reshape(np.shape(data))


def _narrowed(data: Array, dtype: tl.dtype) -> Array:
    """Numbers as the bits of `dtype`, rounded to nearest even."""
    numbers = torch.from_numpy(np.array(data, dtype=np.float32, order="C", copy=True).reshape(-1))
    target = _TORCH[dtype]
    if target.itemsize == 1:
        largest = torch.finfo(target).max
        numbers = torch.where(numbers.isnan(), numbers, numbers.clamp(-largest, largest))
        bits = numbers.to(target).view(torch.uint8).numpy()
    else:
        bits = numbers.to(target).view(torch.int16).numpy().view(np.uint16)
    return bits.reshape(np.shape(data))


def _handle(data: Array, dtype: tl.dtype) -> Any:
    return interpreter.TensorHandle(_narrowed(data, dtype) if dtype in _TORCH else data, dtype)


def _widened_handle(handle: Any) -> Array:
    return _widened(handle.data, handle.dtype.scalar)


# ---------------------------------------------------------------- what is replaced, and when


def _first_is_narrow(first: Any, *_others: Any) -> bool:
    return _is_narrow(first)


def _is_narrow_or_compares(left: Any, _right: Any, operation: Callable[..., Array]) -> bool:
    return _is_narrow(left) or operation in _COMPARISONS  # which give no number of left's dtype


def _third_is_narrow(_first: Any, _second: Any, third: Any, *_others: Any) -> bool:
    return _is_narrow(third)


def _computes_narrow(_left: Any, _right: Any, other: Any, operation: Any) -> bool:
    return operation is not np.where and _is_narrow(other)


def _converts_narrow(source: Any, target: tl.dtype, *_others: Any) -> bool:
    return _is_narrow(source) or target.scalar in _TORCH


def _always(*_operands: Any) -> bool:
    return True


def _unary(operand: Any, operation: Callable[..., Array]) -> Any:
    return _handle(operation(_widened_handle(operand)), operand.dtype.scalar)


def _binary(left: Any, right: Any, operation: Callable[..., Array]) -> Any:
    data = operation(_widened_handle(left), _widened_handle(right))
    return _handle(data, tl.int1 if operation in _COMPARISONS else left.dtype.scalar)


def _ternary(left: Any, right: Any, other: Any, operation: Callable[..., Array]) -> Any:
    operands = (_widened_handle(operand) for operand in (left, right, other))
    return _handle(operation(*operands), other.dtype.scalar)


def _fma(left: Any, right: Any, other: Any) -> Any:
    product = _widened_handle(left).astype(np.float64) * _widened_handle(right)
    return _handle(product + _widened_handle(other), other.dtype.scalar)


def _dot(left: Any, right: Any, total: Any, *_options: Any) -> Any:
    """Add up in double precision: in single, a BLAS adds some rows in another order than others."""
    wide = (_widened_handle(operand).astype(np.float64) for operand in (left, right))
    product = np.matmul(*wide).astype(total.data.dtype)
    return interpreter.TensorHandle(product + total.data, total.dtype.scalar)


def _convert(source: Any, target: tl.dtype, *_rounding: Any) -> Any:
    data = _widened_handle(source)
    if target.scalar not in _TORCH:
        data = data.astype(interpreter._get_np_dtype(target))
    return _handle(data, target.scalar)


_REPLACEMENTS = (
    ("unary_op", _first_is_narrow, _unary),
    ("binary_op", _is_narrow_or_compares, _binary),
    ("ternary_op", _computes_narrow, _ternary),
    ("create_fma", _third_is_narrow, _fma),
    ("create_dot", _always, _dot),
    ("cast_impl", _converts_narrow, _convert),
    ("create_fp_to_fp", _converts_narrow, _convert),
)


def _patch_builder(builder: Any) -> None:
    """Wrap what the interpreter does to numbers."""
    for name, applies, replacement in _REPLACEMENTS:
        setattr(builder, name, _wrapped(getattr(builder, name), applies, replacement))


def _wrapped(
    original: Callable[..., Any], applies: Callable[..., bool], replacement: Callable[..., Any]
) -> Callable[..., Any]:
    def method(self: Any, *operands: Any) -> Any:
        return replacement(*operands) if applies(*operands) else original(self, *operands)

    return method


def _patch_sum(reductions: Any) -> None:
    original = reductions.sum

    def narrow_sum(self: Any, values: Any) -> Any:
        dtype = values.handle.dtype.scalar
        if dtype not in _TORCH:
            return original(self, values)
        total = np.sum(_widened_handle(values.handle), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(_narrowed(total, dtype), values.dtype)

    reductions.sum = narrow_sum
