"""Which attention backend a worker uses."""

from __future__ import annotations

import torch

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.torch import TorchAttention
from wire.config import Settings, SettingsError


def select_backend(
    settings: Settings, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """Make the backend that ATTENTION_BACKEND asks for; `auto` takes the fastest that works here.

    Raises:
        SettingsError: it does not work here.

    """
    if settings.attention_backend not in ("auto", "torch"):
        raise SettingsError(
            f"ATTENTION_BACKEND={settings.attention_backend}: not available here; "
            "`auto` and `torch` are"
        )
    return TorchAttention(settings.block_size, dtype, device)
