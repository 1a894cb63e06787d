"""Numbers between host and device. Nothing here makes the host wait for what the device computes.

On a GPU they pass through pinned memory, which torch keeps until the copy is done; on the CPU they
stay where they are.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Values as a tensor of the device; on the CPU it shares their memory."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Arrival(Protocol):
    """Numbers on their way to the host."""

    def is_here(self) -> bool:
        """Whether `numbers` would return at once."""

    def numbers(self) -> list[int]:
        """Wait for them. Raises whatever went wrong on the device meanwhile."""


class CopyOut(Protocol):
    """How integers (N,) of the device come to the host."""

    def __call__(self, source: Tensor) -> Arrival:
        """Begin to copy what will be in `source` once all that was begun before is done."""


def copy_out_of(device: torch.device) -> CopyOut:
    """What copies from this device."""
    return CudaCopyOut(device) if device.type == "cuda" else _Here


class _Here:
    """Numbers that never left the host."""

    def __init__(self, source: Tensor) -> None:
        self._numbers: list[int] = source.tolist()

    def is_here(self) -> bool:
        return True

    def numbers(self) -> list[int]:
        return self._numbers


class CudaCopyOut:
    """Copies on a stream of its own, so that the next step's computation need not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, source: Tensor) -> Arrival:
        """Begin to copy; the memory of `source` is kept for it."""
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            source.record_stream(self._stream)
            done: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps
            done.record(self._stream)
        return _OnItsWay(target, done)


class _OnItsWay:
    def __init__(self, target: Tensor, done: Any) -> None:
        self._target = target
        self._done = done

    def is_here(self) -> bool:
        return bool(self._done.query())

    def numbers(self) -> list[int]:
        self._done.synchronize()
        numbers: list[int] = self._target.tolist()
        return numbers
