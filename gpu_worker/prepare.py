"""Rewrites a loaded stock model for the CPU: the decoder of `decoder`, with its weights packed.

Owns which models can be rewritten, and the check of each rewrite: every layer, and the head, must
say what the untouched one says in float32, within what the type of the weights allows. Whatever is
not known, or does not pass, runs untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog
import torch
from torch import Tensor

from gpu_worker.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    KVShape,
    LayerAttention,
)
from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.dense import attend_causal
from gpu_worker.decoder import DecoderLayer, DecoderWeights, NativeDecoder
from gpu_worker.model_loader import ATTENTION_NAME, LoadedModel
from gpu_worker.native import packing
from gpu_worker.native.library import NoLibraryError
from gpu_worker.native.memory import Pages
from gpu_worker.native.packing import HALF, PackedLinear, interleaved
from wire.config import Settings, SettingsError

log = structlog.get_logger()

# Classes whose layers are: norm, attention with rotary positions, norm, gated MLP.
FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}

# Largest error of what a layer adds, relative to its size.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.int8: 0.15}

_NUM_CHECKED = 20  # tokens that the check runs


class CannotPrepareError(Exception):
    """The model stays as it is; the text says why."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Largest errors relative to float32 of what is computed with the same stock weights."""

    layers: float
    logits: float


def prepare(settings: Settings, model: LoadedModel, backend: AttentionBackend) -> LoadedModel:
    """Rewrite a model for speed if it is known and the backend is the CPU's; else leave it.

    Raises:
        SettingsError: QUANTIZATION or BATCH_INVARIANT asks for what only a rewritten model can do.

    """
    try:
        decoder = _decoder(settings, model, backend)
        accuracy = check(decoder, model, settings)
        decoder.choose_threads(_small_cache(settings, model, 1))
    except (CannotPrepareError, NoLibraryError) as error:
        if settings.quantization != "none":
            raise SettingsError(f"QUANTIZATION={settings.quantization}: {error}") from None
        if settings.batch_invariant:
            raise SettingsError(f"BATCH_INVARIANT=1: {error}") from None
        if model.device.type == "cpu":
            log.warning("model_runs_untouched", reason=str(error))
        return model
    log.info(
        "model_rewritten",
        quantization=settings.quantization,
        error_of_layers=round(accuracy.layers, 5),
        error_of_logits=round(accuracy.logits, 5),
    )
    model.module.model.layers = torch.nn.ModuleList()  # the packed weights stand in for them
    return replace(model, decoder=decoder)


def _decoder(settings: Settings, model: LoadedModel, backend: AttentionBackend) -> NativeDecoder:
    if not isinstance(backend, CpuAttention):
        raise CannotPrepareError("only the CPU kernels have a rewritten model")
    kind = torch.int8 if settings.quantization == "int8" else model.dtype
    return NativeDecoder(
        extract(model, kind),
        settings.model_cache_dir / "kernels",
        max_tokens=max(settings.max_num_batched_tokens, _NUM_CHECKED),
        is_invariant=settings.batch_invariant,
    )


# ---------------------------------------------------------------- what a model consists of


def extract(model: LoadedModel, kind: torch.dtype) -> DecoderWeights:
    """Pack the weights of a model of a known family. Raises CannotPrepareError for any other."""
    module, config = model.module, model.module.config
    _refuse_unknown(model)
    first = module.model.layers[0].self_attn
    pack = partial(packing.pack, kind=kind, pages=Pages())
    positions = torch.arange(model.max_model_len)
    cos, sin = module.model.rotary_emb(torch.zeros(1, dtype=torch.float32), positions[None])
    half = first.head_dim // 2
    return DecoderWeights(
        layers=[
            _layer(layer, how.sliding_window or 0, pack)
            for layer, how in zip(module.model.layers, model.attention, strict=True)
        ],
        embedding=module.model.embed_tokens.weight.detach(),
        norm=_floats(module.model.norm),
        head=pack(module.lm_head.weight, module.lm_head.bias),
        cos=cos[0, :, :half].contiguous(),
        sin=sin[0, :, :half].contiguous(),
        intermediate=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=first.head_dim,
        eps=config.rms_norm_eps,
        scale=model.attention[0].scale,
        kind=kind,
    )


def _refuse_unknown(model: LoadedModel) -> None:
    name, config = type(model.module).__name__, model.module.config
    if name not in FAMILIES:
        raise CannotPrepareError(f"{name} is not among {', '.join(sorted(FAMILIES))}")
    if config.hidden_act != "silu":
        raise CannotPrepareError(f"its activation is {config.hidden_act}, not silu")
    if any(how.softcap is not None or how.sinks is not None for how in model.attention):
        raise CannotPrepareError("it attends with a soft cap or sinks")
    odd = [n for n in (config.hidden_size, config.intermediate_size) if n % HALF]
    if odd or model.kv_shapes[0].key_dim % 2:
        raise CannotPrepareError(f"a size is no multiple of {HALF}")


def _layer(layer: Any, window: int, pack: Callable[..., PackedLinear]) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias = projections[0].bias is not None
    bias = torch.cat([p.bias for p in projections]) if has_bias else None
    if any(p.bias is not None for p in (mlp.gate_proj, mlp.up_proj)):
        raise CannotPrepareError("its MLP has biases")
    is_normed = hasattr(attention, "q_norm")
    return DecoderLayer(
        input_norm=_floats(layer.input_layernorm),
        post_norm=_floats(layer.post_attention_layernorm),
        q_norm=_floats(attention.q_norm) if is_normed else None,
        k_norm=_floats(attention.k_norm) if is_normed else None,
        qkv=pack(torch.cat([p.weight for p in projections]), bias),
        out=pack(attention.o_proj.weight, attention.o_proj.bias),
        gate_up=pack(interleaved(mlp.gate_proj.weight, mlp.up_proj.weight), None),
        down=pack(mlp.down_proj.weight, mlp.down_proj.bias),
        window=window,
    )


def _floats(norm: Any) -> Tensor:
    weight: Tensor = norm.weight.detach().float()
    return weight


# ---------------------------------------------------------------- the check


class _OneSequence(AttentionBackend):
    """A sequence that is run in one piece: nothing has to be kept from call to call."""

    def alloc_kv(self, shapes: Sequence[KVShape], num_blocks: int) -> None: ...

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("nothing is stored")

    def begin_step(self, metadata: AttentionMetadata) -> None: ...

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._key, self._value = key, value

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        return attend_causal(query, self._key, self._value, how).transpose(0, 1)


def check(decoder: NativeDecoder, model: LoadedModel, settings: Settings) -> Accuracy:
    """Compare each layer, and the head, with the untouched model. CannotPrepareError if one fails.

    Both get what the untouched layer before made, so errors do not add up.
    """
    module = model.module
    tolerance = TOLERANCES[torch.int8 if settings.quantization == "int8" else model.dtype]
    num_tokens = min(_NUM_CHECKED, model.max_model_len)
    positions = torch.arange(num_tokens)
    cache = _small_cache(settings, model, num_tokens)
    token_ids = positions * (model.vocab_size // num_tokens)
    hidden = module.model.embed_tokens(token_ids).float()
    embeddings = module.model.rotary_emb(hidden, positions[None])
    errors = []
    for i, layer in enumerate(module.model.layers):
        expected = copy.deepcopy(layer).float()(
            hidden[None],
            position_embeddings=embeddings,
            position_ids=positions[None],
            **{ATTENTION_NAME: _OneSequence()},
        )[0]
        found = decoder.run_layer(i, hidden, positions, cache)
        errors.append(_error(found - hidden, expected - hidden))
        if not errors[-1] <= tolerance:
            raise CannotPrepareError(f"layer {i} is off by {errors[-1]:.2g} when it is rewritten")
        hidden = expected
    normed = copy.deepcopy(module.model.norm).float()(hidden).to(model.dtype)
    error = _error(decoder.run_head(hidden, positions, cache), module.lm_head(normed).float())
    if not error <= tolerance:
        raise CannotPrepareError(f"the logits are off by {error:.2g} when they are rewritten")
    return Accuracy(max(errors), error)


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _small_cache(settings: Settings, model: LoadedModel, num_tokens: int) -> CpuAttention:
    """A cache for one sequence, at the start of its step."""
    size = settings.block_size
    cache = CpuAttention(size, model.dtype, settings.model_cache_dir / "kernels")
    num_blocks = -(-num_tokens // size)
    cache.alloc_kv(model.kv_shapes, num_blocks)
    slots, blocks = torch.arange(num_tokens), torch.arange(num_blocks)
    lens = slots.numpy()[-1:] + 1
    starts = torch.tensor([0, num_tokens]).numpy()
    cache.begin_step(AttentionMetadata(starts, lens, slots, blocks[None]))
    return cache
