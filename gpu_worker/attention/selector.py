"""Which attention backend a worker uses."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
import torch

from gpu_worker.attention.base import AttentionBackend, KVShape
from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.cpu_library import NoLibraryError
from gpu_worker.attention.torch import TorchAttention
from wire.config import Settings, SettingsError

log = structlog.get_logger()


def select_backend(
    settings: Settings, dtype: torch.dtype, device: torch.device, shapes: Sequence[KVShape]
) -> AttentionBackend:
    """Make the backend that ATTENTION_BACKEND asks for; `auto` takes the fastest that works here.

    Raises:
        SettingsError: it does not work here.

    """
    choice = settings.attention_backend
    if choice == "triton":
        raise SettingsError("ATTENTION_BACKEND=triton: not available here; `auto` is")
    if choice == "cpu" or (choice == "auto" and device.type == "cpu"):
        try:
            return _native(settings, dtype, device, shapes)
        except NoLibraryError as error:
            if choice == "cpu":
                raise SettingsError(f"ATTENTION_BACKEND=cpu: {error}") from None
            log.warning("attention_in_plain_torch", reason=str(error))
    return TorchAttention(settings.block_size, dtype, device)


def _native(
    settings: Settings, dtype: torch.dtype, device: torch.device, shapes: Sequence[KVShape]
) -> CpuAttention:
    if device.type != "cpu":
        raise NoLibraryError(f"the device is {device.type}")
    backend = CpuAttention(settings.block_size, dtype, settings.model_cache_dir / "kernels")
    backend.prepare(shapes)
    return backend
