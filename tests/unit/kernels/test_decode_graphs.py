"""Decode steps that are repeated say what eager ones say, whatever their buffers held before.

On the CPU a recorder repeats: it calls the same work on the same tensors, as a CUDA graph does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
import triton
from torch import Tensor

from gpu_worker import model_runner
from gpu_worker.attention.triton import TritonAttention
from gpu_worker.decode_graphs import DecodeGraphs, sizes_up_to
from gpu_worker.input_batch import InputBatch
from gpu_worker.model_loader import LoadedModel
from gpu_worker.model_runner import ModelRunner
from gpu_worker.prepare import prepare
from gpu_worker.request_states import Capacity, RequestStates
from gpu_worker.work import Work
from tests.fakes import tiny_models
from tests.fakes.recorder import Recorder
from tests.fakes.schedules import execute, play, random_prompts
from tests.fakes.step_driver import StepDriver
from wire.config import load
from wire.messages import SamplingParams

BLOCK, NUM_BLOCKS = 16, 80

pytestmark = pytest.mark.usefixtures("no_interpreter")  # one test has it all the same

MakeRunner = Callable[..., ModelRunner]


@pytest.fixture
def make_graph_runner(tiny_model: Callable[[str], LoadedModel]) -> MakeRunner:
    """A runner of the GPU's kind on the CPU; without a recorder all is eager."""

    def make(
        name: str = "llama", recorder: Recorder | None = None, max_num_seqs: int = 7
    ) -> ModelRunner:
        model = tiny_model(name)
        backend = TritonAttention(BLOCK, torch.float32, model.device)
        with torch.inference_mode():
            model = prepare(load(block_size=BLOCK), model, backend)
        capacity = Capacity(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            max_model_len=tiny_models.MAX_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            vocab_size=model.vocab_size,
        )
        runner = ModelRunner(model, backend, capacity, capture=recorder)
        with torch.inference_mode():
            runner.warm_up()
        return runner

    return make


@pytest.fixture
def eager_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Logits of each repeated step, and those of the same step run eagerly just before it."""
    pairs: list[tuple[Tensor, Tensor]] = []
    run = DecodeGraphs.run

    def both(self: DecodeGraphs, states: RequestStates, work: Work) -> Tensor:
        batch = model_runner.make_batch(states, work)
        runner = both.runner  # type: ignore[attr-defined]
        eager = runner._forward(batch).clone()
        repeated = run(self, states, work)
        pairs.append((repeated.clone(), eager))
        return repeated

    monkeypatch.setattr(DecodeGraphs, "run", both)
    yield pairs


def watch(runner: ModelRunner) -> None:
    DecodeGraphs.run.runner = runner  # type: ignore[attr-defined]


def test_sizes_end_with_the_largest_batch_and_waste_little() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(3) == [1, 2, 3]
    assert sizes_up_to(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    for largest in range(1, 300):
        sizes = sizes_up_to(largest)
        assert sizes[-1] == largest
        assert all(low < high <= 2 * low for low, high in pairwise(sizes))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_a_repeated_step_is_the_eager_one(
    name: str, make_graph_runner: MakeRunner, eager_logits: list[tuple[Tensor, Tensor]]
) -> None:
    """Windows, two kinds of layers, sinks; padding that comes and goes."""
    recorder = Recorder()
    runner = make_graph_runner(name, recorder)
    watch(runner)
    assert recorder.num_captured == len(sizes_up_to(7))
    driver = started(runner, [15, 40, 17, 1, 31, 33, 2])
    for req in (4, 1, 7, 2, 3, 6):
        driver.take(execute(runner, driver.step()))
        driver.take(execute(runner, driver.step(finish=(req,))))
    driver.add(8, [1, 2, 3])
    driver.take(execute(runner, driver.step({8: 3})))
    driver.take(execute(runner, driver.step()))
    assert [len(repeated) for repeated, _ in eager_logits] == [
        7,
        6,
        6,
        5,
        5,
        4,
        4,
        3,
        3,
        2,
        2,
        1,
        2,
    ]
    assert recorder.num_replays == len(eager_logits)
    for repeated, eager in eager_logits:
        torch.testing.assert_close(repeated, eager, atol=2e-5, rtol=1e-5)


def test_answers_are_those_of_a_worker_without_graphs(make_graph_runner: MakeRunner) -> None:
    prompts = random_prompts(7, seed=4)
    samplings = [
        SamplingParams(max_tokens=99, temperature=t, top_k=k, top_p=p, min_p=m, seed=seed)
        for seed, (t, k, p, m) in enumerate(
            [(0.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0)] * 2 + [(0.0, 0, 1.0, 0.0)]
        )
    ]
    recorder = Recorder()
    with_graphs = play(make_graph_runner("llama", recorder), prompts, samplings, 15, seed=2)
    without = play(make_graph_runner("llama"), prompts, samplings, 15, seed=3)
    assert with_graphs == without
    assert recorder.num_replays > 3


# ---------------------------------------------------------------- padding and what was there before


def started(runner: ModelRunner, lengths: list[int]) -> StepDriver:
    """Requests with prompts of these lengths, all of which decode now."""
    driver = StepDriver(NUM_BLOCKS, BLOCK)
    for req, length in enumerate(lengths, start=1):
        driver.add(req, [(7 * req + i) % tiny_models.VOCAB for i in range(length)])
    driver.take(execute(runner, driver.step({req + 1: n for req, n in enumerate(lengths)})))
    return driver


def pools(runner: ModelRunner) -> list[Tensor]:
    """Every number of the cache."""
    layers = range(len(runner.model.kv_shapes))
    return [pool for layer in layers for pool in runner.backend.cache(layer)]


@pytest.mark.parametrize("num_rows", [1, 3, 5, 7])
def test_padding_stores_nothing(num_rows: int, make_graph_runner: MakeRunner) -> None:
    """Only the slots of the real rows change: not slot -1, which is the last, nor block 0."""
    runner = make_graph_runner(recorder=Recorder(), max_num_seqs=8)
    for pool in pools(runner):
        pool.fill_(torch.nan)
    driver = started(runner, [15, 16, 17, 1, 31, 33, 2][:num_rows])
    before = [pool.clone() for pool in pools(runner)]
    driver.take(execute(runner, driver.step()))
    written = torch.zeros(NUM_BLOCKS, BLOCK, dtype=torch.bool)
    for request in driver.requests.values():
        block, place = divmod(request.num_computed - 1, BLOCK)
        written[request.blocks[block], place] = True
    assert int(written.sum()) == num_rows
    for old, new in zip(before, pools(runner), strict=True):
        is_same = (old == new) | (old.isnan() & new.isnan())
        assert torch.equal(~is_same.all(dim=3).all(dim=1), written)


def test_padding_is_nobodys_business_even_where_the_cache_is_nan(
    make_graph_runner: MakeRunner,
) -> None:
    """All that no token stands in is NaN: a padding row that read anything would show it."""
    for num_rows in (3, 5):
        runner = make_graph_runner(recorder=Recorder(), max_num_seqs=8)
        for pool in pools(runner):
            pool.fill_(torch.nan)
        driver = started(runner, [40, 17, 3, 16, 1][:num_rows])
        for _ in range(4):
            result = execute(runner, driver.step())
            assert result.errors == []
            driver.take(result)
        assert runner._graphs is not None
        assert runner._graphs._logits[:8].isfinite().all()


def test_what_a_larger_batch_left_in_the_buffers_changes_nothing(
    make_graph_runner: MakeRunner,
) -> None:
    """Six long requests, then two short ones in the same rows, against two that come first."""

    def short(runner: ModelRunner) -> list[list[int]]:
        driver = started(runner, [5, 18])
        for _ in range(6):
            driver.take(execute(runner, driver.step()))
        return [request.output for request in driver.requests.values()]

    fresh = short(make_graph_runner(recorder=Recorder()))
    runner = make_graph_runner(recorder=Recorder())
    driver = started(runner, [70, 60, 20, 33, 50, 18])
    for _ in range(3):
        driver.take(execute(runner, driver.step()))
    runner.reset()
    graphs = runner._graphs
    assert graphs is not None
    with torch.inference_mode():
        for size in (1, 4, 7):  # as wrong as it can be
            graphs._flat[size].fill_(2**30)
        graphs._tables.fill_(-1)
    assert short(runner) == fresh


def test_a_step_that_is_split_may_run_one_graph_twice(
    make_graph_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ModelRunner._forward

    def outputs(most: int) -> list[list[int]]:
        runner = make_graph_runner(recorder=Recorder())
        driver = StepDriver(NUM_BLOCKS, BLOCK)
        for req in range(1, 7):
            driver.add(req, [(7 * req + i) % tiny_models.VOCAB for i in range(2 * req)])
        driver.take(execute(runner, driver.step({1: 2, 2: 4, 3: 6, 4: 8})))

        def limited(self: ModelRunner, batch: InputBatch) -> Tensor:
            if len(batch.token_ids) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(self, batch)

        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "_forward", limited)
            driver.take(execute(runner, driver.step({5: 10, 6: 12})))
        return [request.output for request in driver.requests.values()]

    assert outputs(most=13) == outputs(most=100)  # in parts of which two are two decodes each


def test_a_row_that_is_no_number_fails_alone(make_graph_runner: MakeRunner) -> None:
    runner = make_graph_runner(recorder=Recorder())
    sick = tiny_models.VOCAB - 1
    runner.model.module.model.embed_tokens.weight.data[sick] = torch.inf
    driver = StepDriver(NUM_BLOCKS, BLOCK)
    for req, prompt in enumerate(([sick] * 4, [5, 6], [9]), start=1):
        driver.add(req, prompt)
    healthy = StepDriver(NUM_BLOCKS, BLOCK)
    result = execute(runner, driver.step({1: 4, 2: 2, 3: 1}))
    for _ in range(3):
        assert [(error.req, error.message) for error in result.errors] == [
            (1, "its logits are not finite")
        ]
        driver.take(result)
        result = execute(runner, driver.step())
    driver.take(result)
    alone = make_graph_runner(recorder=Recorder())
    for req, prompt in enumerate(([1] * 4, [5, 6], [9]), start=1):
        healthy.add(req, prompt)
    healthy.take(execute(alone, healthy.step({1: 4, 2: 2, 3: 1})))
    for _ in range(3):
        healthy.take(execute(alone, healthy.step()))
    for req in (2, 3):
        assert driver.requests[req].output == healthy.requests[req].output


def test_the_kernels_themselves_repeat(
    make_graph_runner: MakeRunner,
    eager_logits: list[tuple[Tensor, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the interpreter: writing to the cache, decode and reduce, and the sampler."""
    runner = make_graph_runner(recorder=Recorder(), max_num_seqs=4)
    watch(runner)
    monkeypatch.setitem(vars(triton.knobs.runtime), "interpret", True)
    driver = started(runner, [17, 3, 5])
    driver.take(execute(runner, driver.step()))
    driver.take(execute(runner, driver.step(finish=(2,))))
    assert [len(repeated) for repeated, _ in eager_logits] == [3, 2]
    for repeated, eager in eager_logits:
        torch.testing.assert_close(repeated, eager, atol=2e-5, rtol=1e-5)


# ---------------------------------------------------------------- what is not repeated


def test_steps_with_more_than_decodes_are_eager(make_graph_runner: MakeRunner) -> None:
    recorder = Recorder()
    runner = make_graph_runner(recorder=recorder)
    driver = started(runner, [5, 6])
    driver.take(execute(runner, driver.step()))
    assert recorder.num_replays == 1
    driver.add(9, [1, 2, 3])
    driver.take(execute(runner, driver.step({9: 3})))
    assert recorder.num_replays == 1
    driver.take(execute(runner, driver.step()))
    assert recorder.num_replays == 2


def test_attention_in_more_pieces_than_there_is_room_for_is_eager(
    make_graph_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    runner = make_graph_runner(recorder=recorder)
    graphs = runner._graphs
    assert graphs is not None
    monkeypatch.setitem(graphs._max_items, 2, 1)
    driver = started(runner, [5, 6])
    driver.take(execute(runner, driver.step()))
    assert recorder.num_replays == 0


def test_a_model_that_cannot_be_captured_runs_eagerly(
    make_graph_runner: MakeRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refuses(Recorder):
        def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    runner = make_graph_runner(recorder=Refuses())
    assert runner._graphs is None
    assert "decode_runs_eagerly" in capsys.readouterr().out
    driver = started(runner, [5, 6])
    driver.take(execute(runner, driver.step()))


def test_warming_up_leaves_no_request_behind(make_graph_runner: MakeRunner) -> None:
    runner = make_graph_runner(recorder=Recorder())
    assert runner.epoch == 0
    assert not len(runner._states)
