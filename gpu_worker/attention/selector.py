"""Which attention backend a worker uses."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from gpu_worker.attention.base import KVShape, PagedBackend
from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.torch import TorchAttention
from gpu_worker.native.library import NoLibraryError
from wire.config import Settings, SettingsError

log = structlog.get_logger()


def select_backend(
    settings: Settings, dtype: torch.dtype, device: torch.device, shapes: Sequence[KVShape]
) -> PagedBackend:
    """Make the backend that ATTENTION_BACKEND asks for; `auto` takes the fastest that works here.

    Raises:
        SettingsError: it does not work here.

    """
    choice = settings.attention_backend
    for name, device_type, make in (("triton", "cuda", _triton), ("cpu", "cpu", _native)):
        if choice != name and (choice != "auto" or device.type != device_type):
            continue
        try:
            return make(settings, dtype, device, shapes)
        except NoLibraryError as error:
            if choice == name:
                raise SettingsError(f"ATTENTION_BACKEND={name}: {error}") from None
            log.warning("attention_in_plain_torch", reason=str(error))
    return TorchAttention(settings.block_size, dtype, device)


def _triton(
    settings: Settings, dtype: torch.dtype, device: torch.device, shapes: Sequence[KVShape]
) -> PagedBackend:
    if device.type != "cuda":
        raise NoLibraryError(f"the device is {device.type}")
    try:
        from gpu_worker.attention.triton import TritonAttention  # noqa: PLC0415 - not everywhere
    except ImportError as error:
        raise NoLibraryError(str(error)) from None
    backend = TritonAttention(settings.block_size, dtype, device)
    backend.prepare(shapes)
    return backend


def _native(
    settings: Settings, dtype: torch.dtype, device: torch.device, shapes: Sequence[KVShape]
) -> PagedBackend:
    if device.type != "cpu":
        raise NoLibraryError(f"the device is {device.type}")
    backend = CpuAttention(settings.block_size, dtype, settings.model_cache_dir / "kernels")
    backend.prepare(shapes)
    return backend
