"""A span of the worker lasts from the step that begins a request to the last one of it."""

from __future__ import annotations

from gpu_worker.traces import StepTraces
from wire.messages import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SamplingParams,
    SchedulerOutput,
    token_ids,
)
from wire.traces import Span, TraceContext, new_trace

WISH = new_trace()
ABOVE = WISH.child("request")


class Kept:
    """Takes spans, and keeps them."""

    def __init__(self) -> None:
        self.spans: list[tuple[Span, int]] = []

    def begins(self, context: TraceContext) -> bool:
        return True

    def end(self, span: Span, end_ns: int) -> None:
        self.spans.append((span, end_ns))

    async def close(self) -> None: ...


def new(req: int, num_tokens: int, *, is_traced: bool = True) -> NewRequestData:
    return NewRequestData(
        req,
        token_ids(list(range(10))),
        token_ids(),
        [0],
        0,
        num_tokens,
        SamplingParams(max_tokens=5),
        str(WISH) if is_traced else None,
    )


def step(number: int, **fields: object) -> SchedulerOutput:
    return SchedulerOutput(1, number, **fields)  # type: ignore[arg-type] # free keywords


def answer(number: int) -> ModelRunnerOutput:
    return ModelRunnerOutput(1, number, device_us=1000)


def test_a_prompt_in_two_chunks_then_tokens_then_its_end() -> None:
    kept = Kept()
    traces = StepTraces(kept, "w.1")
    listed = CachedRequestData([7, 8], [6, 1], [[], []])
    steps = [
        step(1, new_reqs=[new(7, 4), new(8, 10, is_traced=False)]),
        step(2, cached_reqs=listed),
        step(3, num_decodes=2),
        step(4, finished_reqs=[7, 8]),
    ]
    for one in steps[:2]:  # two are on their way
        traces.submitted(one)
    for number, one in enumerate([*steps[2:], None, None], 1):
        traces.answered(answer(number))
        if one is not None:
            traces.submitted(one)
    [(span, end_ns)] = kept.spans
    assert span.name == "compute"
    assert span.parent == ABOVE
    assert span.attributes["pagestream.num_steps"] == 3
    [event] = span.events
    assert event.name == "prefill_done"
    assert span.start_ns <= event.at_ns <= end_ns


def test_one_that_comes_back_has_a_span_for_each_time() -> None:
    kept = Kept()
    traces = StepTraces(kept, "w.1")
    order: list[dict[str, object]] = [
        {"new_reqs": [new(7, 10)]},
        {"preempted_reqs": [7]},
        {"new_reqs": [new(7, 10)]},
        {"finished_reqs": [7]},
    ]
    for number, fields in enumerate(order, 1):
        traces.submitted(step(number, **fields))
        traces.answered(answer(number))
    (first, first_end), (second, _) = kept.spans
    assert first.context != second.context
    assert first.parent == second.parent == ABOVE
    assert first_end <= second.start_ns


def test_a_fence_and_the_end_of_an_incarnation_end_what_is_held() -> None:
    kept = Kept()
    traces = StepTraces(kept, "w.1")
    traces.submitted(step(1, new_reqs=[new(7, 10)]))
    traces.submitted(SchedulerOutput(2, 0, is_fence=True))
    for number in (1, 0):
        traces.answered(answer(number))
    assert [span.error for span, _ in kept.spans] == [None]
    traces.submitted(SchedulerOutput(2, 1, new_reqs=[new(9, 10)]))
    traces.answered(answer(1))
    traces.close()
    assert [span.error for span, _ in kept.spans] == [None, "incarnation_ended"]


def test_a_step_of_an_epoch_that_is_over_begins_nothing() -> None:
    kept = Kept()
    traces = StepTraces(kept, "w.1")
    traces.submitted(step(1, new_reqs=[new(7, 10)]))
    traces.answered(None)
    traces.answered(answer(2))  # the refusal of a step that nobody could read
    traces.close()
    assert kept.spans == []
