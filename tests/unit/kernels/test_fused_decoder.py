"""A model that is rewritten for a GPU says what the stock one says, with the same weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_worker import fused, fused_decoder, prepare
from gpu_worker.attention.base import LayerAttention
from gpu_worker.attention.triton import TritonAttention
from gpu_worker.fused import FusedNorm
from gpu_worker.fused_decoder import FusedDecoder
from gpu_worker.model_loader import LoadedModel, load_model
from gpu_worker.model_runner import ModelRunner
from gpu_worker.request_states import Capacity
from gpu_worker.work import Work
from kernels.silu_mul import silu_mul
from tests.fakes import tiny_models
from tests.unit.gpu_worker.test_decoder import KNOWN, STEPS, assert_equals_stock, play
from tests.unit.kernels.test_fused import logits_of
from wire.config import load

BLOCK = 16

pytestmark = pytest.mark.usefixtures("no_interpreter")  # one test has it all the same


def rewritten(folder: Path, dtype: str = "float32", *, is_float8: bool = False) -> ModelRunner:
    """A runner of the GPU's kind on the CPU, with its model as a start of a worker leaves it."""
    settings = load(device="cpu", dtype=dtype, block_size=BLOCK)
    model = load_model(settings, folder)
    backend = TritonAttention(BLOCK, model.dtype, model.device, is_float8=is_float8)
    with torch.inference_mode():
        model = prepare.prepare(settings, model, backend)
    capacity = Capacity(64, BLOCK, tiny_models.MAX_LEN, 16, 256, model.vocab_size)
    return ModelRunner(model, backend, capacity)


@pytest.fixture
def seen_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Logits (N, V) that each step sampled from."""
    seen: list[Tensor] = []
    compute = ModelRunner._logits

    def watched(self: ModelRunner, work: Work) -> Any:
        logits, of_prompts = compute(self, work)
        seen.append(logits.clone())
        return logits, of_prompts

    monkeypatch.setattr(ModelRunner, "_logits", watched)
    yield seen


def with_biases() -> Any:
    sizes = {**tiny_models._SIZES, "num_hidden_layers": 2}
    return transformers.LlamaConfig(**sizes, attention_bias=True, mlp_bias=True)


@pytest.fixture
def folder_of(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """The folders of tiny models, and of one whose products all have biases."""

    def find(name: str) -> Path:
        if name != "biases":
            return tiny_folder(name)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(with_biases(), dtype=torch.float32)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(tmp_path)
        return tmp_path

    return find


@pytest.mark.parametrize("name", [*KNOWN, "biases"])
def test_chunks_mixed_batches_and_decodes_equal_full_forwards(
    name: str, folder_of: Callable[[str], Path], seen_logits: list[Tensor]
) -> None:
    runner = rewritten(folder_of(name))
    assert isinstance(runner.model.decoder, FusedDecoder)
    assert not len(runner.model.module.model.layers)
    assert_equals_stock(folder_of(name), play(runner, seen_logits, STEPS))


def test_the_kernels_themselves_say_so(
    tiny_folder: Callable[[str], Path],
    seen_logits: list[Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = rewritten(tiny_folder("qwen3"))
    assert isinstance(runner.model.decoder, FusedDecoder)
    monkeypatch.setitem(vars(triton.knobs.runtime), "interpret", True)
    assert_equals_stock(tiny_folder("qwen3"), play(runner, seen_logits, STEPS[:5]))


def test_a_cache_of_one_byte_a_number_holds_rotated_keys(
    tiny_folder: Callable[[str], Path], seen_logits: list[Tensor]
) -> None:
    exact = play(rewritten(tiny_folder("llama")), seen_logits, STEPS[:5])
    runner = rewritten(tiny_folder("llama"), is_float8=True)
    assert runner.backend.cache(0)[0].element_size() == 1
    for req, rows in play(runner, seen_logits, STEPS[:5]).items():
        (_, row), (_, expected) = rows[0], exact[req][0]  # later ones may follow other tokens
        assert 0 < (row - expected).norm() / expected.norm() < 0.2


class NoAttention(TritonAttention):
    """Keeps nothing, and looks at no number."""

    def rotate_and_write(self, layer: int, *_: Tensor, **__: Tensor) -> None: ...

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        return query.transpose(0, 1)


@pytest.mark.parametrize("name", KNOWN)
def test_a_graph_can_hold_it(name: str, tiny_folder: Callable[[str], Path]) -> None:
    model = rewritten(tiny_folder(name)).model
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        ids = torch.zeros(4, dtype=torch.int64)
        backend = NoAttention(BLOCK, model.dtype, model.device)
        logits = model.forward(ids, torch.zeros_like(ids), torch.arange(2), backend)
    assert logits.shape == (2, model.vocab_size)


class Launches(TorchDispatchMode):
    """Counts what a GPU would be given to do by torch: operations that give more than a view."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(  # torch calls it so
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_view = any(returned.alias_info for returned in func._schema.returns)
        if not is_view and func is not torch.ops.aten._unsafe_view.default:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", KNOWN)
def test_between_its_products_torch_has_nothing_to_launch(
    name: str, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = rewritten(tiny_folder(name)).model
    assert isinstance(model.decoder, FusedDecoder)
    monkeypatch.setattr(fused_decoder, "residual_rmsnorm", lambda rows, *_: rows)
    monkeypatch.setattr(fused, "silu_mul", lambda gate_up: gate_up.chunk(2, dim=-1)[0])
    backend = NoAttention(BLOCK, model.dtype, model.device)
    stream, positions = torch.zeros(4, 48), torch.arange(4)
    with Launches() as launches, torch.no_grad():
        model.decoder._run(0, stream, stream, positions, backend)
    expected = ["addmm" if name.startswith("qwen2") else "mm", "mm", "mm", "mm"]
    assert [launch.partition(".")[0] for launch in launches.names] == expected


# ---------------------------------------------------------------- what is rewritten


def memory_of(model: LoadedModel) -> dict[int, int]:
    """Bytes of the weights' storages, by address."""
    storages = [weight.untyped_storage() for weight in model.module.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.mark.parametrize("name", KNOWN)
@torch.inference_mode()
def test_no_weight_is_in_memory_twice(name: str, tiny_folder: Callable[[str], Path]) -> None:
    model = load_model(load(device="cpu", dtype="bfloat16"), tiny_folder(name))
    before, expected = memory_of(model), logits_of(model)
    decoder = FusedDecoder(model, torch.cat(prepare.rotary_table(model), dim=1))
    assert sum(memory_of(model).values()) == sum(before.values())
    merged = [layer.qkv.weight for layer in decoder._layers]
    merged += [layer.mlp.gate_up.weight for layer in decoder._layers]
    assert {weight.data_ptr() for weight in merged} <= set(memory_of(model))
    assert torch.equal(logits_of(model), expected), "the stock model can still run"


@pytest.mark.parametrize(
    ("owner", "sick"),
    [
        (fused, "silu_mul"),
        (fused_decoder, "residual_rmsnorm"),
        (TritonAttention, "rotate_and_write"),
        (FusedDecoder, "run_head"),
    ],
    ids=["silu", "norm", "rotation", "head"],
)
@torch.inference_mode()
def test_a_rewrite_that_says_something_else_is_not_taken(
    owner: Any, sick: str, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = load_model(load(device="cpu", dtype="float32"), tiny_folder("llama"))
    expected = logits_of(stock)
    real = getattr(owner, sick)

    def slightly_off(*operands: Any, **options: Any) -> Any:
        if sick == "rotate_and_write":
            options["positions"] = options["positions"] // 2
        found = real(*operands, **options)
        return None if found is None else found * 1.01

    monkeypatch.setattr(owner, sick, slightly_off)
    model = rewritten(tiny_folder("llama")).model
    assert model.decoder is None
    monkeypatch.setattr(owner, sick, real)
    torch.testing.assert_close(logits_of(model), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("is_right", [True, False])
@torch.inference_mode()
def test_large_numbers_in_the_stream_hide_nothing_that_is_wrong(
    is_right: bool, dtype: str, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(device="cpu", dtype=dtype, block_size=BLOCK)
    model = load_model(settings, tiny_folder("llama"))
    tiny_models.make_stream_uneven(model.module)
    if not is_right:
        monkeypatch.setattr(fused, "silu_mul", lambda gate_up: 1.15 * silu_mul(gate_up))
    backend = TritonAttention(BLOCK, model.dtype, model.device)
    assert (prepare.prepare(settings, model, backend).decoder is not None) == is_right


@pytest.mark.parametrize("name", ["phi3", "gemma2"])
def test_an_unknown_family_gets_the_kernels_that_fit(
    name: str, tiny_folder: Callable[[str], Path]
) -> None:
    model = rewritten(tiny_folder(name)).model
    assert model.decoder is None
    norms = [m for m in model.module.modules() if isinstance(m, FusedNorm)]
    assert len(norms) == (5 if name == "phi3" else 0)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({"intermediate_size": 62}, "bfloat16"), ({"hidden_size": 60}, "bfloat16")],
)
def test_sizes_that_a_kernel_refuses_run_without_it(
    changes: dict[str, int], dtype: str, tmp_path: Path
) -> None:
    sizes = {**tiny_models._SIZES, **changes, "num_hidden_layers": 2}
    model = rewritten(tiny_models.save(transformers.LlamaConfig(**sizes), tmp_path), dtype).model
    assert model.decoder is None
    assert logits_of(model).isfinite().all()


@torch.inference_mode()
def test_without_memory_for_the_check_nothing_of_the_attempt_is_left(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Any]] = []

    def refuse(decoder: FusedDecoder, *_: Any) -> None:
        made.append(weakref.ref(decoder))
        raise torch.OutOfMemoryError("CUDA out of memory")

    def fuse(model: LoadedModel) -> None:
        assert made[0]() is None, "it would keep merged weights that are merged again"
        model.module.is_fused = True

    monkeypatch.setattr(prepare, "check", refuse)
    monkeypatch.setattr(fused, "fuse", fuse)
    model = rewritten(tiny_folder("llama")).model
    assert model.decoder is None
    assert model.module.is_fused


def test_products_that_are_no_plain_ones_are_left_alone(
    tiny_folder: Callable[[str], Path],
) -> None:
    class Quantised(torch.nn.Module): ...

    settings = load(device="cpu", dtype="float32", block_size=BLOCK)
    model = load_model(settings, tiny_folder("llama"))
    model.module.model.layers[1].mlp.up_proj = Quantised()
    with pytest.raises(prepare.CannotPrepareError, match="no plain ones"):
        prepare._refuse_unknown(model)
