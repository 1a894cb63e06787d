"""A scheduler that writes down every call and what came of it, so that a run can be had again.

Owns the format. The file holds a line of JSON each: a head, then the calls in order; a call that
decides something is followed by a line with the digest of its decision. A call is written before it
is made: one that crashes is the last in the file. Prompts are in it, since they are arguments.

    {"recording": 1, "epoch": 7, "config": {…}}
    {"call": "add_request", "args": [3, "<message>", 12.5]}
    {"call": "schedule", "args": ["worker-a.1f", 12.6]}
    {"gives": "9a0c…", "is": "step 4: 31 decode, 1 new, 0 preempted"}
"""

# ruff: noqa: D102 - what a verb promises stands in Scheduler

from __future__ import annotations

import base64
import hashlib
import json
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import structlog

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.outputs import Outputs
from scheduler_svc.core.scheduler import Scheduler
from wire import codec
from wire.config import SettingsError
from wire.messages import (
    EngineCoreRequest,
    FinishReason,
    HeldRequest,
    ModelRunnerOutput,
    SchedulerOutput,
)

FORMAT = 1

log = structlog.get_logger()


def new_scheduler(config: SchedulerConfig, epoch: int, record_file: Path | None) -> Scheduler:
    """Make the scheduler of an epoch; it records to `<record_file>.<epoch>` if there is a name.

    When that file cannot be made, it is logged, and nothing is recorded.
    """
    if record_file is None:
        return Scheduler(config, epoch)
    path = record_file.with_name(f"{record_file.name}.{epoch}")
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        log.error("recording_failed", file=str(path), error=str(error))
        return Scheduler(config, epoch)
    log.warning("recording_calls", file=str(path), why="RECORD_FILE is set; prompts are in it")
    recorder = Recorder(config, epoch, file)
    weakref.finalize(recorder, file.close)
    return recorder


def check_record_file(record_file: Path | None) -> None:
    """Raise SettingsError unless a recording can be written there."""
    if record_file is None:
        return
    if not record_file.name or not os.access(record_file.absolute().parent, os.W_OK | os.X_OK):
        raise SettingsError(
            f"RECORD_FILE={record_file}: must be a file in a folder that can be written to"
        )


class Recorder(Scheduler):
    """Decides like a Scheduler, and writes all of it down.

    When the file cannot be written any longer, recording ends; scheduling goes on.
    """

    def __init__(self, config: SchedulerConfig, epoch: int, file: TextIO) -> None:
        super().__init__(config, epoch)
        self._file: TextIO | None = file
        self._write({"recording": FORMAT, "epoch": epoch, "config": asdict(config)})

    # ------------------------------------------------------------ the verbs

    def add_worker(self, worker: str, capacity: WorkerCapacity, last_step: int = 0) -> None:
        self._call("add_worker", worker, asdict(capacity), last_step)
        super().add_worker(worker, capacity, last_step)

    def adopt(self, worker: str, held: Iterable[HeldRequest]) -> int:
        answer = ModelRunnerOutput(0, 0, held=list(held))
        self._call("adopt", worker, text_of(answer))
        num_tokens = super().adopt(worker, answer.held)
        self._decided(num_tokens)
        return num_tokens

    def remove_worker(self, worker: str, *, is_orderly: bool = False) -> None:
        self._call("remove_worker", worker, is_orderly)
        super().remove_worker(worker, is_orderly=is_orderly)

    def reset_prefix_cache(self) -> None:
        self._call("reset_prefix_cache")
        super().reset_prefix_cache()

    def reconfigure(self, config: SchedulerConfig) -> None:
        self._call("reconfigure", asdict(config))
        super().reconfigure(config)

    def add_request(self, num: int, request: EngineCoreRequest, arrival: float) -> None:
        self._call("add_request", num, text_of(request), arrival)
        super().add_request(num, request, arrival)

    def abort_request(
        self, num: int, reason: FinishReason = "abort", num_output_tokens: int | None = None
    ) -> None:
        self._call("abort_request", num, reason, num_output_tokens)
        super().abort_request(num, reason, num_output_tokens)

    def expire(self, now: float) -> None:
        self._call("expire", now)
        super().expire(now)

    def restore_served(self, served: dict[str, float]) -> None:
        self._call("restore_served", served)
        super().restore_served(served)

    def take_served(self) -> dict[str, float]:
        self._call("take_served")
        served = super().take_served()
        self._decided(served)
        return served

    def take_outputs(self) -> Outputs:
        self._call("take_outputs")
        outputs = super().take_outputs()
        self._decided(outputs)
        self._flush()
        return outputs

    def schedule(self, worker: str, now: float) -> SchedulerOutput | None:
        self._call("schedule", worker, now)
        step = super().schedule(worker, now)
        self._decided(step)
        return step

    def update_from_output(self, worker: str, output: ModelRunnerOutput) -> bool:
        self._call("update_from_output", worker, text_of(output))
        is_trusted = super().update_from_output(worker, output)
        self._decided(is_trusted)
        return is_trusted

    # ------------------------------------------------------------ the file

    def _call(self, verb: str, *args: Any) -> None:
        self._write({"call": verb, "args": args})

    def _decided(self, decision: Decision) -> None:
        self._write({"gives": digest_of(decision), "is": summary_of(decision)})

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            self._give_up(error)

    def _flush(self) -> None:
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.error("recording_ended", error=str(error))
        self._file = None


Decision = SchedulerOutput | Outputs | dict[str, float] | bool | int | None
"""What a verb may return."""


def digest_of(decision: Decision) -> str:
    """Name a decision: equal names, equal decisions to the last bit."""
    if isinstance(decision, SchedulerOutput):
        data = codec.encode(decision)
    else:
        data = repr(decision).encode()  # plain values, in the order in which they came about
    return hashlib.sha256(data).hexdigest()[:32]


def summary_of(decision: Decision) -> str:
    """Say a decision to a person."""
    match decision:
        case SchedulerOutput():
            return (
                f"step {decision.step_id}: {decision.num_decodes} decode, "
                f"{len(decision.new_reqs)} new, {len(decision.preempted_reqs)} preempted"
            )
        case Outputs():
            return f"{len(decision.reqs)} tokens, {len(decision.finished)} ends"
        case None:
            return "nothing to run"
        case _:
            return str(decision)[:200]


def text_of(message: EngineCoreRequest | ModelRunnerOutput) -> str:
    """Turn a message into text that `message_of` reads."""
    return base64.b64encode(codec.encode(message)).decode()


def message_of(text: str) -> EngineCoreRequest | ModelRunnerOutput:
    """Turn text back into a message. ValueError if it is none."""
    message = codec.decode(base64.b64decode(text, validate=True))
    if not isinstance(message, EngineCoreRequest | ModelRunnerOutput):
        raise ValueError(f"{type(message).__name__} is no argument of a call")
    return message
