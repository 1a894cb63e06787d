"""Which attention backend a worker uses."""

from __future__ import annotations

import os
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
            if settings.kv_cache_dtype != "auto":
                raise _no_such_cache(settings, str(error)) from None
            log.warning("attention_in_plain_torch", reason=str(error))
    if settings.kv_cache_dtype != "auto":
        raise _no_such_cache(settings, "this worker attends in plain torch")
    return TorchAttention(settings.block_size, dtype, device)


def _triton(
    settings: Settings, dtype: torch.dtype, device: torch.device, shapes: Sequence[KVShape]
) -> PagedBackend:
    if device.type != "cuda":
        raise NoLibraryError(f"the device is {device.type}")
    # Beside the models: what is compiled once then outlives the container.
    os.environ.setdefault("TRITON_CACHE_DIR", str(settings.model_cache_dir / "kernels" / "triton"))
    try:
        from gpu_worker.attention.triton import TritonAttention  # noqa: PLC0415 - not everywhere
    except ImportError as error:
        raise NoLibraryError(str(error)) from None
    is_float8 = settings.kv_cache_dtype == "fp8"
    backend = TritonAttention(settings.block_size, dtype, device, is_float8=is_float8)
    backend.prepare(shapes)
    return backend


def _native(
    settings: Settings, dtype: torch.dtype, device: torch.device, shapes: Sequence[KVShape]
) -> PagedBackend:
    if device.type != "cpu":
        raise NoLibraryError(f"the device is {device.type}")
    if settings.kv_cache_dtype != "auto":
        raise _no_such_cache(settings, "the device is cpu")
    backend = CpuAttention(settings.block_size, dtype, settings.model_cache_dir / "kernels")
    backend.prepare(shapes)
    return backend


def _no_such_cache(settings: Settings, reason: str) -> SettingsError:
    return SettingsError(
        f"KV_CACHE_DTYPE={settings.kv_cache_dtype}: only the Triton kernels of a GPU read it, and "
        f"{reason}; `auto` works here"
    )
