"""Impossible settings are refused by name; events that do not fit are counted and ignored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from scheduler_svc.core.config import SchedulerConfig, WorkerCapacity
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.live_config import LIVE, LiveConfig
from scheduler_svc.worker_link import WorkerLink
from wire.config import load
from wire.messages import (
    ConfigChange,
    EngineCoreRequest,
    ModelRunnerOutput,
    SamplingParams,
    token_ids,
)

# ---------------------------------------------------------------- settings of the core

BAD_CONFIGS: list[dict[str, Any]] = [
    {"max_num_seqs": 0},
    {"max_num_seqs": 9, "max_num_batched_tokens": 8},
    {"max_num_batched_tokens": 0, "max_num_seqs": 1},
    {"long_prefill_token_threshold": -1},
    {"reserved_blocks": -1},
    {"watermark": 1.0},
    {"watermark": -0.1},
    {"watermark": math.nan},
    {"policy": "lifo"},
    {"priority_ageing_s": -1.0},
    {"priority_ageing_s": math.inf},
    {"queue_timeout_s": math.nan},
    {"deadline_action": "hope"},
    {"preemption_mode": "sometimes"},
    {"preemption_victim": "oldest"},
    {"max_worker_losses": 0},
]


@pytest.mark.parametrize("changes", BAD_CONFIGS, ids=str)
def test_an_impossible_configuration_names_its_setting(changes: dict[str, Any]) -> None:
    (name, value), *_ = changes.items()
    with pytest.raises(ValueError, match=name) as refused:
        SchedulerConfig(**changes)
    assert f"({value})" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_blocks", 0),
        ("block_size", 0),
        ("block_size", -16),
        ("max_model_len", 0),
        ("num_cpu_blocks", -1),
    ],
)
def test_a_worker_without_room_is_no_worker(name: str, value: int) -> None:
    fields = {"num_blocks": 8, "block_size": 16, "max_model_len": 10, name: value}
    with pytest.raises(ValueError, match=name):
        WorkerCapacity(**fields)


def test_a_worker_with_blocks_of_another_size_is_refused() -> None:
    scheduler = Scheduler(SchedulerConfig())
    scheduler.add_worker("w", WorkerCapacity(8, 16, 100))
    with pytest.raises(ValueError, match="block_size"):
        scheduler.add_worker("other", WorkerCapacity(8, 32, 100))
    assert list(scheduler.lanes) == ["w"]


# ---------------------------------------------------------------- settings that change

WORKER = {
    "incarnation": "1",
    "num_blocks": "64",
    "block_size": "16",
    "max_model_len": "4096",
    "beats": "1",
    "max_num_seqs": "256",
    "max_num_batched_tokens": "2048",
}

BAD_CHANGES = [
    ({"MAX_NUM_SEQS": "0"}, "MAX_NUM_SEQS"),
    ({"MAX_NUM_SEQS": "4096"}, "MAX_NUM_SEQS"),
    ({"MAX_NUM_SEQS": "257"}, "registered at most 256"),
    ({"MAX_NUM_BATCHED_TOKENS": "2049"}, "registered at most 2048"),
    ({"MAX_NUM_BATCHED_TOKENS": "255"}, "MAX_NUM_BATCHED_TOKENS"),
    ({"MAX_NUM_BATCHED_TOKENS": "many"}, "MAX_NUM_BATCHED_TOKENS=many"),
    ({"WATERMARK": "1"}, "WATERMARK=1"),
    ({"WATERMARK": "nan"}, "WATERMARK=nan"),
    ({"RESERVED_BLOCKS": "-1"}, "RESERVED_BLOCKS=-1"),
    ({"SCHEDULING_POLICY": "lifo"}, "SCHEDULING_POLICY=lifo"),
    ({"PREEMPTION_MODE": "sometimes"}, "PREEMPTION_MODE=sometimes"),
    ({"PREEMPTION_VICTIM": "oldest"}, "PREEMPTION_VICTIM=oldest"),
    ({"DEADLINE_ACTION": "hope"}, "DEADLINE_ACTION=hope"),
    ({"PRIORITY_AGEING_S": "inf"}, "PRIORITY_AGEING_S=inf"),
    ({"QUEUE_TIMEOUT_S": "-1"}, "QUEUE_TIMEOUT_S=-1"),
    ({"BATCH_WAIT_MS": "1001"}, "BATCH_WAIT_MS=1001"),
    ({"LONG_PREFILL_TOKEN_THRESHOLD": "-1"}, "LONG_PREFILL_TOKEN_THRESHOLD=-1"),
    ({"BLOCK_SIZE": "32"}, "BLOCK_SIZE cannot change"),
    ({"NUM_CPU_BLOCKS": "-1"}, "NUM_CPU_BLOCKS cannot change"),
    ({"NO_SUCH": "1"}, "NO_SUCH cannot change"),
    ({"MAX_NUM_SEQS": "8", "WATERMARK": "2"}, "WATERMARK=2"),
]


@pytest.mark.parametrize(("asked", "named"), BAD_CHANGES, ids=str)
def test_an_impossible_change_names_its_setting_and_changes_nothing(
    asked: dict[str, str], named: str
) -> None:
    settings = load()
    live = LiveConfig(settings, {})
    change = ConfigChange("c", list(asked), list(asked.values()))
    answer = live.apply(change, [WorkerLink.of("w", WORKER, 0.0)])
    assert named in str(answer["refused"])
    assert (live.settings, live.version) == (settings, 0)


@pytest.mark.parametrize(
    ("names", "values"),
    [(["WATERMARK"], []), ([], ["1"]), (["WATERMARK", "WATERMARK"], ["0.1", "0.2"])],
)
def test_a_change_without_a_value_for_each_name_is_refused(
    names: list[str], values: list[str]
) -> None:
    assert LiveConfig(load(), {}).apply(ConfigChange("c", names, values), [])["refused"]


def test_every_live_setting_can_be_changed() -> None:
    live = LiveConfig(load(), {})
    for version, name in enumerate(LIVE, 1):
        value = str(getattr(live.settings, name.lower()))
        answer = live.apply(ConfigChange("c", [name], [value]), [])
        assert (answer["refused"], answer["version"]) == ("", version)


def test_a_worker_with_less_room_than_the_limits_is_refused() -> None:
    link = WorkerLink.of("w", {**WORKER, "max_num_seqs": "100"}, 0.0)
    with pytest.raises(ValueError, match="MAX_NUM_SEQS=256: worker w registered at most 100"):
        link.check(SchedulerConfig())
    link.check(SchedulerConfig(max_num_seqs=100))


# ---------------------------------------------------------------- requests that make no sense


def a_request(tokens: int = 5, max_tokens: int = 5, **fields: Any) -> EngineCoreRequest:
    prompt = token_ids(list(range(tokens)))
    return EngineCoreRequest("r", "g", 1, prompt, SamplingParams(max_tokens), **fields)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (a_request(tokens=0), "no tokens"),
        (a_request(weight=0.0), "weight"),
        (a_request(weight=-1.0), "weight"),
        (a_request(weight=math.inf), "weight"),
        (a_request(weight=math.nan), "weight"),
        (a_request(tokens=1000), "1000 tokens"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(request_: EngineCoreRequest, error: str) -> None:
    scheduler = a_scheduler()
    scheduler.add_request(2, request_, 0.0)
    (end,) = scheduler.take_outputs().finished
    assert (end.req, end.error_code) == (2, "invalid")
    assert error in (end.error or "")
    scheduler.check_integrity()


@pytest.mark.parametrize("max_tokens", [0, -3])
def test_a_request_for_no_tokens_ends_at_once(max_tokens: int) -> None:
    scheduler = a_scheduler()
    scheduler.add_request(2, a_request(max_tokens=max_tokens), 0.0)
    (end,) = scheduler.take_outputs().finished
    assert (end.finish_reason, end.num_output_tokens) == ("length", 0)


# ---------------------------------------------------------------- events that do not fit


def a_scheduler() -> Scheduler:
    """With one request, one step in flight, and epoch 3."""
    scheduler = Scheduler(SchedulerConfig(), epoch=3)
    scheduler.add_worker("w", WorkerCapacity(8, 4, 100))
    scheduler.add_request(1, a_request(), 0.0)
    assert scheduler.schedule("w", 0.0) is not None
    return scheduler


def result(epoch: int = 3, step_id: int = 1, *tokens: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(epoch, step_id, token_ids(list(tokens or (7,))))


def end_it(scheduler: Scheduler) -> None:
    scheduler.abort_request(1)


EVENTS: dict[str, list[Callable[[Scheduler], Any]]] = {
    "result of an unknown worker": [lambda core: core.update_from_output("x", result())],
    "result of an older epoch": [lambda core: core.update_from_output("w", result(2))],
    "result of a later epoch": [lambda core: core.update_from_output("w", result(4))],
    "result of a step that was not sent": [
        lambda core: core.update_from_output("w", result(3, 2)),
    ],
    "result of a step of long ago": [lambda core: core.update_from_output("w", result(3, 0))],
    "failure of a step that was not sent": [
        lambda core: core.update_from_output("w", ModelRunnerOutput(3, 9, failed="so it says")),
    ],
    "result of a worker that is gone": [
        lambda core: core.remove_worker("w"),
        lambda core: core.update_from_output("w", result()),
    ],
    "a result twice": [
        lambda core: core.update_from_output("w", result()),
        lambda core: core.update_from_output("w", result()),
    ],
    "abort of an unknown request": [lambda core: core.abort_request(99)],
    "an abort twice": [end_it, end_it],
    "a stop string of a request that has ended": [
        end_it,
        lambda core: core.abort_request(1, "stop", 3),
    ],
    "a request twice": [lambda core: core.add_request(1, a_request(), 5.0)],
    "loss of an unknown worker": [lambda core: core.remove_worker("x")],
    "a worker twice": [lambda core: core.add_worker("w", WorkerCapacity(9, 4, 100))],
    "a step for an unknown worker": [lambda core: core.schedule("x", 0.0)],
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_that_does_not_fit_is_counted_and_ignored(name: str) -> None:
    scheduler = a_scheduler()
    *before, event = EVENTS[name]
    for fitting in before:
        fitting(scheduler)
    scheduler.take_outputs()
    assert scheduler.totals.num_ignored == 0
    event(scheduler)
    assert scheduler.totals.num_ignored == 1
    assert not scheduler.take_outputs()
    scheduler.check_integrity()


def test_a_late_result_of_a_request_that_has_ended_is_dropped() -> None:
    scheduler = a_scheduler()
    scheduler.abort_request(1)
    scheduler.take_outputs()
    assert scheduler.update_from_output("w", result())
    assert not scheduler.take_outputs()


@pytest.mark.parametrize(("claimed", "counted"), [(-5, 0), (0, 0), (1, 1), (99, 1)])
def test_a_stop_string_counts_no_more_tokens_than_there_are(claimed: int, counted: int) -> None:
    scheduler = a_scheduler()
    scheduler.update_from_output("w", result())
    scheduler.take_outputs()
    scheduler.abort_request(1, "stop", claimed)
    (end,) = scheduler.take_outputs().finished
    assert end.num_output_tokens == counted
