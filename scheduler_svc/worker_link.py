"""One incarnation of a worker as the leader sees it, and whether it can still be relied on.

Pure: time comes in as an argument, and it is the leader's own monotonic clock. The clocks of two
machines are never compared; what counts is when the leader saw something change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from wire.codec import WIRE_VERSION
from wire.config import Settings, setting_name

STREAM_TTL_S = 60
"""How long the streams of a dead worker can still be looked at."""


@dataclass(slots=True)
class WorkerLink:
    """Liveness of one incarnation of a worker."""

    name: str
    process: str  # "<name>.<incarnation>"
    capacity: WorkerCapacity
    limits: dict[str, int]  # settings that its memory was laid out for
    beats: str
    beats_changed: float
    last_step: int = 0  # last step that was sent when it was given up, or the fence
    is_fenced: bool = False  # and has not answered yet

    @classmethod
    def of(cls, name: str, fields: Mapping[str, str], now: float) -> WorkerLink:
        """Read what a ready worker registered. ValueError or KeyError if it makes no sense."""
        if (spoken := fields.get("wire", "1")) != str(WIRE_VERSION):
            raise ValueError(
                f"it speaks version {spoken} of the messages, and this scheduler {WIRE_VERSION}"
            )
        capacity = WorkerCapacity(
            num_blocks=int(fields["num_blocks"]),
            block_size=int(fields["block_size"]),
            max_model_len=int(fields["max_model_len"]),
            num_cpu_blocks=int(fields.get("num_cpu_blocks", 0)),
        )
        names = ("max_num_seqs", "max_num_batched_tokens")
        limits = {setting: int(fields[setting]) for setting in names if setting in fields}
        return cls(name, process_of(name, fields), capacity, limits, fields["beats"], now)

    def check(self, limits: SchedulerConfig | Settings) -> None:
        """Raise ValueError if a limit is above what this worker laid its memory out for."""
        for name, registered in self.limits.items():
            limit = getattr(limits, name)
            if limit > registered:
                raise ValueError(
                    f"{setting_name(name)}={limit}: worker {self.name} registered at most "
                    f"{registered}"
                )

    def heard(self, fields: Mapping[str, str], now: float) -> None:
        """Take note of the latest heartbeat."""
        beats = fields.get("beats", self.beats)
        if beats != self.beats:
            self.beats, self.beats_changed = beats, now

    def why_lost(
        self, fields: Mapping[str, str], now: float, timeout_s: float, step_timeout_s: float
    ) -> str | None:
        """Say why this incarnation must be given up; None while it may live."""
        if fields and process_of(self.name, fields) != self.process:
            return "another incarnation took its place"
        if fields.get("state") != "ready" and fields:
            return f"it is {fields.get('state')}"
        if now - self.beats_changed > timeout_s:
            return f"its heart has not beaten for {timeout_s:g} s"
        if float(fields.get("step_age_ms", 0)) > step_timeout_s * 1000:
            return f"one step takes longer than {step_timeout_s:g} s"
        return None

    def is_back(self, fields: Mapping[str, str], step_timeout_s: float) -> bool:
        """Whether a worker that was given up has come back to life."""
        step_age_s = float(fields.get("step_age_ms", 0)) / 1000
        return fields.get("beats", self.beats) != self.beats and step_age_s <= step_timeout_s


def process_of(name: str, fields: Mapping[str, str]) -> str:
    """Name of an incarnation in the keys of its streams."""
    return f"{name}.{fields.get('incarnation', '')}"
