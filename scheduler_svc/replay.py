"""`python -m scheduler_svc.replay FILE`: make all calls of a recording again, and compare.

Owns the comparison. Every decision of a fresh core must be the recorded one, bit for bit. Exit code
0 if all are, 1 if one differs or a call fails, 2 if the file is no recording.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import FORMAT, Decision, digest_of, message_of, summary_of
from wire.messages import EngineCoreRequest, ModelRunnerOutput


class RecordingError(ValueError):
    """The file is no recording, or one that this version does not understand."""


@dataclass(slots=True)
class Difference:
    """The first decision that is not the recorded one, or the call that failed."""

    line: int
    call: str
    recorded: str
    replayed: str


@dataclass(slots=True)
class Report:
    """What a replay came to."""

    num_calls: int = 0
    num_decisions: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    is_cut: bool = False  # the last line is not whole: the process died while it wrote
    difference: Difference | None = None

    def __str__(self) -> str:
        lines = [
            f"{self.num_calls} calls, {self.num_decisions} decisions, {self.num_steps} steps, "
            f"{self.num_tokens} tokens, {self.num_preemptions} preemptions"
        ]
        if self.is_cut:
            lines.append("the last line is cut off: the process died while it wrote")
        if self.difference is None:
            lines.append("every decision is the recorded one")
        else:
            first = self.difference
            lines += [
                f"first difference at line {first.line}: {first.call}",
                f"  recorded: {first.recorded}",
                f"  replayed: {first.replayed}",
            ]
        return "\n".join(lines)


def replay(lines: Iterable[str]) -> Report:
    """Make the calls of a recording, up to the first difference.

    Raises RecordingError if it is none.
    """
    numbered = enumerate(lines, 1)
    scheduler = _begin(next(numbered, (1, ""))[1])
    report = Report()
    call, decision = "", None
    for number, text in numbered:
        line = _parsed(number, text)
        if line is None:
            report.is_cut = True
            break
        if "call" in line:
            verb, args = _verb(line["call"]), line["args"]
            call = f"{line['call']}({', '.join(map(repr, args))})"[:200]
            report.num_calls += 1
            try:
                decision = verb(scheduler, *args)
            except Exception as error:  # whatever the core does is what is looked for
                report.difference = Difference(number, call, "it was made", f"raises {error!r}")
                break
        else:
            report.num_decisions += 1
            if digest_of(decision) != line["gives"]:
                report.difference = Difference(number, call, line["is"], summary_of(decision))
                break
    totals = scheduler.totals
    report.num_steps, report.num_preemptions = totals.num_steps, totals.num_preemptions
    report.num_tokens = totals.num_generated_tokens
    return report


def _begin(text: str) -> Scheduler:
    head = _parsed(1, text)
    if head is None or head.get("recording") != FORMAT:
        raise RecordingError(f"the first line is not the head of a recording of format {FORMAT}")
    try:
        return Scheduler(SchedulerConfig(**head["config"]), head["epoch"])
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"the configuration in its head cannot be used: {error}") from None


def _parsed(number: int, text: str) -> dict[str, Any] | None:
    """Read a line; None if it is cut off."""
    if not text.endswith("\n"):
        return None
    try:
        line = json.loads(text)
    except ValueError as error:
        raise RecordingError(f"line {number}: {error}") from None
    if not isinstance(line, dict):
        raise RecordingError(f"line {number}: expected an object")
    return line


def _verb(name: str) -> Callable[..., Decision]:
    if name not in _VERBS:
        raise RecordingError(f"{name} is no verb of this version's scheduler")
    return _VERBS[name]


def _add_request(scheduler: Scheduler, num: int, text: str, arrival: float) -> None:
    request = message_of(text)
    assert isinstance(request, EngineCoreRequest)
    scheduler.add_request(num, request, arrival)


def _update(scheduler: Scheduler, worker: str, text: str) -> bool:
    output = message_of(text)
    assert isinstance(output, ModelRunnerOutput)
    return scheduler.update_from_output(worker, output)


def _adopt(scheduler: Scheduler, worker: str, text: str) -> int:
    answer = message_of(text)
    assert isinstance(answer, ModelRunnerOutput)
    return scheduler.adopt(worker, answer.held)


_VERBS: dict[str, Callable[..., Decision]] = {
    "add_worker": lambda core, worker, capacity, last_step: core.add_worker(
        worker, WorkerCapacity(**capacity), last_step
    ),
    "adopt": _adopt,
    "remove_worker": lambda core, worker, is_orderly: core.remove_worker(
        worker, is_orderly=is_orderly
    ),
    "reset_prefix_cache": lambda core: core.reset_prefix_cache(),
    "reconfigure": lambda core, config: core.reconfigure(SchedulerConfig(**config)),
    "add_request": _add_request,
    "abort_request": lambda core, *args: core.abort_request(*args),
    "expire": lambda core, now: core.expire(now),
    "restore_served": lambda core, served: core.restore_served(served),
    "take_served": lambda core: core.take_served(),
    "take_outputs": lambda core: core.take_outputs(),
    "schedule": lambda core, worker, now: core.schedule(worker, now),
    "update_from_output": _update,
}


def main(argv: list[str]) -> int:
    """Replay the one file that is named."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m scheduler_svc.replay FILE\n")
        return 2
    try:
        with Path(argv[0]).open(encoding="utf-8") as lines:
            report = replay(lines)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{argv[0]}: {error}\n")
        return 2
    sys.stdout.write(f"{report}\n")
    return 0 if report.difference is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
