"""Settings that can change while the pool serves, and what is allowed.

Owns the settings in force and their version. Pure: what becomes of a change is its return value.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.worker_link import WorkerLink
from wire.config import Settings, SettingsError, changed
from wire.messages import ConfigChange

LIVE = (
    "MAX_NUM_BATCHED_TOKENS",
    "MAX_NUM_SEQS",
    "LONG_PREFILL_TOKEN_THRESHOLD",
    "RESERVE_FULL_PROMPT",
    "WATERMARK",
    "RESERVED_BLOCKS",
    "SCHEDULING_POLICY",
    "PRIORITY_AGEING_S",
    "QUEUE_TIMEOUT_S",
    "DEADLINE_ACTION",
    "PREEMPTION_MODE",
    "PREEMPTION_VICTIM",
    "BATCH_WAIT_MS",
)


class LiveConfig:
    """The scheduler's settings as they are now."""

    def __init__(self, settings: Settings, saved: dict[str, str]) -> None:
        """Begin with what was set at start, and what was changed since, by whatever leader."""
        self.version = int(saved.get("version", 0))
        kept = {name: value for name, value in saved.items() if name in LIVE}
        self.settings = changed(settings, kept) if kept else settings

    @property
    def limits(self) -> dict[str, str]:
        """The settings in force that can be changed, as people write them."""
        values = {name: getattr(self.settings, name.lower()) for name in LIVE}
        return {
            name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in values.items()
        }

    def apply(self, change: ConfigChange, workers: Iterable[WorkerLink]) -> dict[str, str | int]:
        """Try a change; what to write into the `config` hash. A refused one changes nothing."""
        answer: dict[str, str | int] = {"change": change.change_id, "refused": ""}
        asked = dict(zip(change.names, change.values, strict=False))
        try:
            if not len(asked) == len(change.names) == len(change.values):
                raise SettingsError("every setting needs one value, and has to be named once")
            self.settings = self._checked(asked, workers)
        except SettingsError as error:
            return {**answer, "refused": str(error)}
        self.version += bool(asked)
        return {**answer, "version": self.version, **asked}

    def _checked(self, asked: dict[str, str], workers: Iterable[WorkerLink]) -> Settings:
        for name in asked:
            if name not in LIVE:
                allowed = ", ".join(LIVE)
                raise SettingsError(f"{name} cannot change while running; these can: {allowed}")
        settings = changed(self.settings, asked)
        try:
            for link in workers:
                link.check(settings)
            core_config(settings)
        except ValueError as error:
            raise SettingsError(str(error)) from None
        return settings


def core_config(settings: Settings, version: int = 0) -> SchedulerConfig:
    """The part of the settings that the core works with."""
    return SchedulerConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        enable_prefix_caching=settings.enable_prefix_caching,
        reserve_full_prompt=settings.reserve_full_prompt,
        watermark=settings.watermark,
        reserved_blocks=settings.reserved_blocks,
        policy=settings.scheduling_policy,
        priority_ageing_s=settings.priority_ageing_s,
        queue_timeout_s=settings.queue_timeout_s,
        deadline_action=settings.deadline_action,
        preemption_mode=settings.preemption_mode,
        preemption_victim=settings.preemption_victim,
        max_worker_losses=settings.max_worker_losses,
        version=version,
    )
