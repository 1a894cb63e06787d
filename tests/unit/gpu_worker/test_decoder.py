"""A rewritten model says what the stock one says, on every processor and in every batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker import decoder as decoder_module
from gpu_worker import prepare
from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.torch import TorchAttention
from gpu_worker.decoder import FEW_TOKENS, NativeDecoder
from gpu_worker.model_loader import load_model
from gpu_worker.model_runner import ModelRunner
from gpu_worker.native import library
from gpu_worker.native.packing import interleaved
from gpu_worker.request_states import Capacity
from tests.fakes import tiny_models
from tests.fakes.schedules import execute
from tests.fakes.step_driver import StepDriver
from wire.config import Settings, SettingsError, load

KNOWN = ["llama", "mistral", "qwen2", "qwen2_windows", "qwen3"]
BLOCK = 16


@pytest.fixture
def settings_for(kernel_folder: Path) -> Callable[..., Settings]:
    folder = kernel_folder.parent

    def settings(**changes: Any) -> Settings:
        return load(device="cpu", model_cache_dir=folder, **{"dtype": "float32", **changes})

    return settings


@pytest.fixture
def make_runner(
    tiny_folder: Callable[[str], Path], settings_for: Callable[..., Settings]
) -> Callable[..., ModelRunner]:
    """A runner of a rewritten model."""

    def make(name: str = "llama", uses_tiles: bool = True, **changes: Any) -> ModelRunner:
        settings = settings_for(**changes)
        model = load_model(settings, tiny_folder(name))
        backend = CpuAttention(BLOCK, model.dtype, settings.model_cache_dir / "kernels")
        with torch.inference_mode():
            model = prepare.prepare(settings, model, backend)
        assert isinstance(model.decoder, NativeDecoder)
        if not uses_tiles:
            model.decoder.use_vectors()
        capacity = Capacity(64, BLOCK, tiny_models.MAX_LEN, 16, 256, model.vocab_size)
        return ModelRunner(model, backend, capacity)

    return make


LENGTHS = [1, 15, 16, 17, 70]
STEPS: list[dict[str, Any]] = [
    {"start": {5: 33}},
    {"chunks": {5: 7}, "start": {2: 15, 1: 1}},
    {"chunks": {5: 29}, "start": {3: 16}},
    {"chunks": {5: 1}, "start": {4: 10}},
    {"chunks": {4: 7}},
    *[{}] * 6,
]


def play(
    runner: ModelRunner, seen: list[Tensor], steps: list[dict[str, Any]]
) -> dict[int, list[tuple[list[int], Tensor]]]:
    """Run the steps; for each request what was known, and the logits that came of it."""
    driver = StepDriver(num_blocks=64, block_size=BLOCK)
    draw = random.Random(5)
    for req, length in enumerate(LENGTHS, start=1):
        driver.add(req, [draw.randrange(tiny_models.VOCAB) for _ in range(length)])
    found: dict[int, list[tuple[list[int], Tensor]]] = {req: [] for req in driver.requests}
    for wanted in steps:
        seen.clear()
        with torch.inference_mode():
            result = runner.execute(driver.step(**wanted))
        assert result is not None
        for req, row in zip(driver.take(result), seen[0] if seen else (), strict=True):
            request = driver.requests[req]
            found[req].append((request.prompt + request.output[:-1], row))
    return found


def assert_equals_stock(folder: Path, found: dict[int, list[tuple[list[int], Tensor]]]) -> None:
    reference = tiny_models.reference(folder)
    for rows in found.values():
        assert rows
        for tokens, row in rows:
            expected = tiny_models.last_logits(reference, tokens)
            torch.testing.assert_close(row, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", KNOWN)
def test_chunks_mixed_batches_and_decodes_equal_full_forwards(
    name: str,
    make_runner: Callable[..., ModelRunner],
    tiny_folder: Callable[[str], Path],
    seen_logits: list[Tensor],
) -> None:
    runner = make_runner(name)
    assert not len(runner.model.module.model.layers), "the stock weights are gone"
    assert_equals_stock(tiny_folder(name), play(runner, seen_logits, STEPS))


def test_what_a_step_writes_may_be_read_by_another_request_of_it(
    make_runner: Callable[..., ModelRunner],
    tiny_folder: Callable[[str], Path],
    seen_logits: list[Tensor],
) -> None:
    """A block that the first completes is known by its content, and hit by the second."""
    runner = make_runner("llama")
    driver = StepDriver(num_blocks=8, block_size=BLOCK)
    draw = random.Random(6)
    prompt = [draw.randrange(tiny_models.VOCAB) for _ in range(BLOCK + 2)]
    driver.add(1, prompt)
    driver.add(2, prompt)
    with torch.inference_mode():
        runner.execute(driver.step(start={1: BLOCK - 2}))
        step = driver.step(chunks={1: 2}, start={2: len(prompt)})
        blocks = [*driver.requests[1].blocks, step.new_reqs[0].block_ids[1]]
        hit = replace(
            step.new_reqs[0], num_computed_tokens=BLOCK, num_scheduled_tokens=2, block_ids=blocks
        )
        step.new_reqs[:] = [hit]
        seen_logits.clear()
        runner.execute(step)
    expected = tiny_models.last_logits(tiny_models.reference(tiny_folder("llama")), prompt)
    torch.testing.assert_close(seen_logits[0][0], expected, rtol=1e-4, atol=2e-5)


OLDER = {
    "AVX-512": (16, ["-march=x86-64-v4"]),
    "AVX-VNNI": (8, ["-march=x86-64-v3", "-mavxvnni"]),
    "AVX2": (8, ["-march=x86-64-v3"]),
    "plain": (4, list[str]()),
}


@pytest.mark.parametrize(
    "processor",
    [pytest.param(name, marks=pytest.mark.long if name != "AVX2" else ()) for name in OLDER],
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}],
    ids=str,
)
def test_older_processors_say_the_same(
    processor: str,
    changes: dict[str, Any],
    make_runner: Callable[..., ModelRunner],
    seen_logits: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 0.15 if "quantization" in changes else 0.03 if changes else 1e-5
    needed = {"AVX-512": "avx512f", "AVX-VNNI": "avx_vnni"}.get(processor)
    if needed and needed not in library.processor_features():
        pytest.skip(f"this processor has no {processor}")
    here = play(make_runner(**changes), seen_logits, STEPS[:5])
    monkeypatch.setattr(library, "_vectors", lambda: OLDER[processor])
    there = play(make_runner(**changes), seen_logits, STEPS[:5])
    for req, rows in here.items():
        for (_, row), (_, other) in zip(rows, there[req], strict=True):
            assert error(row, other) < most


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_tiles_and_dot_products_say_the_same(
    quantization: str, make_runner: Callable[..., ModelRunner], seen_logits: list[Tensor]
) -> None:
    changes = {"dtype": "bfloat16", "quantization": quantization}
    tiles = play(make_runner(**changes), seen_logits, STEPS[:5])
    vectors = play(make_runner(uses_tiles=False, **changes), seen_logits, STEPS[:5])
    for req, rows in tiles.items():
        for (_, row), (_, other) in zip(rows, vectors[req], strict=True):
            assert error(row, other) < 0.03


@pytest.mark.parametrize(
    "changes", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str
)
@pytest.mark.parametrize("uses_tiles", [True, False])
def test_an_invariant_row_is_the_same_bits_alone_in_a_batch_and_in_chunks(
    changes: dict[str, Any],
    uses_tiles: bool,
    make_runner: Callable[..., ModelRunner],
    seen_logits: list[Tensor],
) -> None:
    def runner() -> ModelRunner:
        return make_runner(uses_tiles=uses_tiles, batch_invariant=True, **changes)

    together = play(runner(), seen_logits, STEPS)
    for req, length in enumerate(LENGTHS, start=1):
        alone = play_alone(runner(), seen_logits, req, length)
        for (tokens, row), (same_tokens, other) in zip(together[req], alone, strict=False):
            assert tokens == same_tokens
            assert torch.equal(row, other)


def play_alone(
    runner: ModelRunner, seen: list[Tensor], req: int, length: int
) -> list[tuple[list[int], Tensor]]:
    found: list[tuple[list[int], Tensor]] = []
    driver = StepDriver(num_blocks=64, block_size=BLOCK)
    draw = random.Random(5)
    for other, size in enumerate(LENGTHS, start=1):
        driver.add(other, [draw.randrange(tiny_models.VOCAB) for _ in range(size)])
    for wanted in [{"start": {req: length}}, {}, {}]:
        seen.clear()
        with torch.inference_mode():
            result = runner.execute(driver.step(**wanted))
        assert result is not None
        driver.take(result)
        request = driver.requests[req]
        found.append((request.prompt + request.output[:-1], seen[0][0]))
    return found


def test_logits_are_the_same_bits_however_many_threads_make_them(
    make_runner: Callable[..., ModelRunner], seen_logits: list[Tensor]
) -> None:
    def logits_of(num_threads: int) -> list[tuple[list[int], Tensor]]:
        runner = make_runner(dtype="bfloat16")
        decoder = runner.model.decoder
        assert isinstance(decoder, NativeDecoder)
        decoder.use_threads(few=[num_threads], most=num_threads)
        return play_alone(runner, seen_logits, req=5, length=70)

    for (tokens, row), (same_tokens, other) in zip(logits_of(1), logits_of(3), strict=True):
        assert tokens == same_tokens
        assert torch.equal(row, other)


def test_small_steps_of_decodes_have_a_choice_of_threads_for_each_size(
    make_runner: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner()
    decoder = runner.model.decoder
    assert isinstance(decoder, NativeDecoder)
    decoder.use_threads(few=[1, 2], most=2)
    settled = [decoder.threads_for(n, n).is_settled for n in range(1, FEW_TOKENS + 2)]
    assert settled == [False] * FEW_TOKENS + [True], "a step of more has no choice"
    assert decoder.threads_for(3, 2).is_settled, "nor has one with a prompt"
    driver = StepDriver(num_blocks=64, block_size=BLOCK)
    driver.add(1, [1, 2, 3])
    ticks = itertools.count()  # all forwards take as long: the fewest threads are as fast
    monkeypatch.setattr(decoder_module, "time", SimpleNamespace(perf_counter=ticks.__next__))
    for wanted in [{"start": {1: 3}}, *[{}] * 112]:  # one trial finds that, and one confirms it
        driver.take(execute(runner, driver.step(**wanted)))
    assert decoder.threads_for(1, 1).count == 1
    assert decoder.threads_for(1, 1).is_settled, "what it took was noted"
    assert not decoder.threads_for(2, 2).is_settled, "that of other sizes was not"


@pytest.mark.parametrize("quantization", ["none", "int8"])
@torch.inference_mode()
def test_weights_that_are_no_numbers_fail_the_check_and_run_untouched(
    quantization: str, tiny_folder: Callable[[str], Path], settings_for: Callable[..., Settings]
) -> None:
    settings = settings_for(dtype="bfloat16", quantization=quantization)
    model = load_model(settings, tiny_folder("llama"))
    model.module.model.layers[1].mlp.down_proj.weight.data[3, 5] = torch.nan
    backend = CpuAttention(BLOCK, model.dtype, settings.model_cache_dir / "kernels")
    if quantization == "none":
        assert prepare.prepare(settings, model, backend).decoder is None
    else:
        with pytest.raises(SettingsError, match="QUANTIZATION=int8: layer 1"):
            prepare.prepare(settings, model, backend)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_an_embedding_that_is_no_number_harms_its_own_rows_only(
    quantization: str, make_runner: Callable[..., ModelRunner], seen_logits: list[Tensor]
) -> None:
    changes = {"dtype": "bfloat16", "quantization": quantization}
    runner = make_runner(**changes)
    healthy = play(runner, seen_logits, STEPS[:5])
    sick_token = play_tokens()[5][0]
    others = [req for req, tokens in play_tokens().items() if sick_token not in tokens]
    runner = make_runner(**changes)
    assert isinstance(runner.model.decoder, NativeDecoder)
    runner.model.module.model.embed_tokens.weight.data[sick_token] = torch.nan
    found = play(runner, seen_logits, STEPS[:5])
    assert not found[5][0][1].isfinite().any()
    assert others
    for req in others:
        assert torch.equal(found[req][0][1], healthy[req][0][1])


def play_tokens() -> dict[int, list[int]]:
    draw = random.Random(5)
    return {
        req: [draw.randrange(tiny_models.VOCAB) for _ in range(length)]
        for req, length in enumerate(LENGTHS, start=1)
    }


# ---------------------------------------------------------------- what is rewritten


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["a layer's", "the head's"])
@torch.inference_mode()
def test_a_rewrite_that_says_something_else_is_not_taken(
    fault: str,
    dtype: str,
    tiny_folder: Callable[[str], Path],
    settings_for: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor with numbers in the stream that are too large to add something small to in bfloat16."""
    settings = settings_for(dtype=dtype)
    model = load_model(settings, tiny_folder("llama"))
    tiny_models.make_stream_uneven(model.module)
    backend = CpuAttention(BLOCK, model.dtype, settings.model_cache_dir / "kernels")
    if fault == "a layer's":
        monkeypatch.setattr(prepare, "interleaved", lambda gate, up: interleaved(up, gate))
    else:
        run_head = NativeDecoder.run_head
        monkeypatch.setattr(NativeDecoder, "run_head", lambda *given: 1.1 * run_head(*given))
    assert prepare.prepare(settings, model, backend).decoder is None
    assert len(model.module.model.layers) == 2


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "mixtral"])
@torch.inference_mode()
def test_an_unknown_family_runs_untouched(
    name: str, tiny_folder: Callable[[str], Path], settings_for: Callable[..., Settings]
) -> None:
    settings = settings_for()
    model = load_model(settings, tiny_folder(name))
    backend = CpuAttention(BLOCK, model.dtype, settings.model_cache_dir / "kernels")
    assert prepare.prepare(settings, model, backend) is model
    for asked in ({"quantization": "int8"}, {"batch_invariant": True}):
        wanted = settings_for(**asked)
        with pytest.raises(SettingsError, match="is not among LlamaForCausalLM"):
            prepare.prepare(wanted, model, backend)


@torch.inference_mode()
def test_another_attention_means_another_forward(
    tiny_folder: Callable[[str], Path], settings_for: Callable[..., Settings]
) -> None:
    settings = settings_for()
    model = load_model(settings, tiny_folder("llama"))
    backend = TorchAttention(BLOCK, model.dtype, model.device)
    assert prepare.prepare(settings, model, backend) is model
