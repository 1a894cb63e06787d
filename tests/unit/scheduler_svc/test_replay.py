"""A recording gives every decision again, and shows where another core decides otherwise."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from scheduler_svc.core import preemption
from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.lane import Lane
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recording import Recorder, new_scheduler
from scheduler_svc.replay import RecordingError, main, replay
from tests.fakes.world import World
from tests.unit.scheduler_svc.test_property import NORMAL, Pool

READ_ONLY = {"next_wake", "check_integrity", "check_capacity", "note_time", "take_ended"}


class Recordings:
    """The files of a world's leaders, one an epoch."""

    def __init__(self) -> None:
        self.files: list[io.StringIO] = []

    def new_scheduler(self, config: SchedulerConfig, epoch: int) -> Scheduler:
        self.files.append(io.StringIO())
        return Recorder(config, epoch, self.files[-1])

    def lines(self, index: int = 0) -> list[str]:
        return self.files[index].getvalue().splitlines(keepends=True)


class RecordedPool(Pool):
    """Any program of the property test, written down, and replayed at its end."""

    recordings: Recordings

    def new_world(
        self, config: SchedulerConfig, capacity: WorkerCapacity, depth: int, workers: int
    ) -> World:
        self.recordings = Recordings()
        new = self.recordings.new_scheduler
        return World(config, capacity, depth=depth, workers=workers, new_scheduler=new)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            for index in range(len(self.recordings.files)):
                report = replay(self.recordings.lines(index))
                assert report.difference is None, str(report)
                assert not report.is_cut


def recorded_run() -> list[str]:
    """A small run with preemptions."""
    recordings = Recordings()
    world = World(
        SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=20),
        WorkerCapacity(12, 4, 1000),
        new_scheduler=recordings.new_scheduler,
    )
    for i in range(12):
        world.add([i % 7 + 1] * 6, max_tokens=12)
    world.finish_everything()
    world.scheduler.take_served()
    assert world.scheduler.totals.num_preemptions
    return recordings.lines()


def test_any_run_is_replayed_bit_for_bit() -> None:
    few = settings(NORMAL, max_examples=max(40, NORMAL.max_examples // 10))
    run_state_machine_as_test(RecordedPool, settings=few)


def test_the_report_counts_what_happened() -> None:
    report = replay(recorded_run())
    assert report.num_tokens == 12 * 12
    assert report.num_steps > 12
    assert report.num_preemptions > 0
    assert "every decision is the recorded one" in str(report)


def test_a_core_that_decides_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = recorded_run()

    def oldest(
        lane: Lane, config: SchedulerConfig, is_allowed: Callable[[Request], bool]
    ) -> Request | None:
        return next((r for r in list(lane.running)[1:] if is_allowed(r)), lane.running[0])

    monkeypatch.setattr(preemption, "choose_victim", oldest)
    report = replay(lines)
    assert report.difference is not None
    assert report.difference.call.startswith("schedule(")
    assert "preempted" in report.difference.replayed


def test_a_changed_argument_is_found() -> None:
    lines = recorded_run()
    index = next(i for i, line in enumerate(lines) if '"add_request"' in line)
    del lines[index]
    report = replay(lines)
    assert report.difference is not None


def test_a_call_that_fails_is_named() -> None:
    lines = recorded_run()
    lines.append(json.dumps({"call": "abort_request", "args": []}) + "\n")
    report = replay(lines)
    assert report.difference is not None
    assert report.difference.line == len(lines)
    assert "TypeError" in report.difference.replayed


def test_a_recording_that_breaks_off_is_replayed_as_far_as_it_goes() -> None:
    text = "".join(recorded_run())
    report = replay(text[:-9].splitlines(keepends=True))
    assert report.is_cut
    assert report.difference is None


@pytest.mark.parametrize(
    "text", ["", "{}\n", "no json\n", "[1]\n", '{"recording": 99}\n', '{"recording": 1}\n']
)
def test_what_is_no_recording_is_refused(text: str) -> None:
    with pytest.raises(RecordingError):
        replay(text.splitlines(keepends=True))


def test_an_unknown_verb_is_refused() -> None:
    head, *_ = recorded_run()
    with pytest.raises(RecordingError, match="dance is no verb"):
        replay([head, '{"call": "dance", "args": []}\n'])


def test_every_verb_of_the_scheduler_is_recorded() -> None:
    verbs = {
        name
        for name, member in vars(Scheduler).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert verbs - READ_ONLY <= vars(Recorder).keys()


def test_without_a_name_nothing_is_recorded_and_with_one_each_epoch_has_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert type(new_scheduler(SchedulerConfig(), 7, None)) is Scheduler
    scheduler = new_scheduler(SchedulerConfig(), 7, tmp_path / "calls")
    assert scheduler.next_wake() is None
    del scheduler  # as when the lead ends
    assert main([str(tmp_path / "calls.7")]) == 0
    assert "every decision is the recorded one" in capsys.readouterr().out


def test_the_exit_code_tells_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calls"
    lines = recorded_run()
    path.write_text("".join(line for line in lines if '"add_request"' not in line))
    assert main([str(path)]) == 1
    assert "first difference at line" in capsys.readouterr().out
    assert main([str(tmp_path / "missing")]) == 2
    assert main([]) == 2


def test_a_full_disk_ends_the_recording_and_not_the_scheduler() -> None:
    class FullDisk(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "no space left on device")

    scheduler = Recorder(SchedulerConfig(), 1, FullDisk())
    scheduler.add_worker("w", WorkerCapacity(8, 4, 100))
    assert scheduler.schedule("w", 0.0) is None
    assert not scheduler.take_outputs()
