"""What the stack on one machine consists of: which processes, with which settings.

Turns settings into commands and environments. Starts nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wire.config import PREFIX, Settings, SettingsError, process_id, setting_name

MODULES = {"scheduler": "scheduler_svc", "worker": "gpu_worker", "gateway": "gateway"}
"""Role -> the module that is run. The order is that of starting; stopping is the reverse."""


@dataclass(frozen=True, slots=True)
class Service:
    """One process of the stack: what to run, and what to call it."""

    name: str  # "worker-1"
    role: str  # "worker"
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    patience_s: float = 10.0  # from being asked to stop until it is made to
    is_echoed: bool = True  # what it writes is shown on the screen


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Command of a module. -P: a folder called `gateway` where the person stands is not ours."""
    return (sys.executable, "-P", "-m", module, *arguments)


def redis_service(command: list[str]) -> Service:
    """Describe the embedded Redis."""
    return Service("redis", "redis", tuple(command), dict(os.environ), is_echoed=False)


def services(
    settings: Settings, workers: int, gateways: int, environ: Mapping[str, str]
) -> list[Service]:
    """List the services in the order of starting: scheduler, workers, gateways.

    Raises:
        SettingsError: the numbers and the settings contradict each other.

    """
    if settings.worker_id is not None and workers > 1:
        raise SettingsError(f"WORKER_ID={settings.worker_id}: names one worker, not {workers}")
    shared = {**environ, **settings_environment(settings)}
    patience_s = settings.drain_timeout_s + 5.0
    numbers = {"scheduler": 1, "worker": workers, "gateway": gateways}
    planned = []
    for role, module in MODULES.items():
        for index in range(numbers[role]):
            extra = (
                _worker_environment(settings, index, workers, environ) if role == "worker" else {}
            )
            planned.append(
                Service(
                    name=role if numbers[role] == 1 else f"{role}-{index + 1}",
                    role=role,
                    command=python_module(module),
                    environ={**shared, **extra},
                    patience_s=patience_s,
                )
            )
    return planned


def settings_environment(settings: Settings) -> dict[str, str]:
    """Every setting that somebody has given a value, as environment variables."""
    given = settings.model_dump(mode="json", include=settings.model_fields_set)
    return {PREFIX + setting_name(k): _text(v) for k, v in given.items() if v is not None}


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _worker_environment(
    settings: Settings, index: int, workers: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """What tells one worker from its siblings.

    A worker keeps its id over restarts, so that a new life is seen to replace the old one at once.
    Several workers share the cores, or take a GPU each in turn, unless the environment says how.
    """
    special = {PREFIX + "WORKER_ID": settings.worker_id or process_id("worker")}
    if workers > 1:
        if "OMP_NUM_THREADS" not in environ:
            special["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // workers))
        num_gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        if num_gpus > 1 and "CUDA_VISIBLE_DEVICES" not in environ:
            special["CUDA_VISIBLE_DEVICES"] = str(index % num_gpus)
    return special
