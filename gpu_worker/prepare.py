"""Rewrites a loaded stock model for speed: a decoder of a known family runs in its place.

On the CPU that is the one of `decoder`, with its weights packed; on a GPU that of `fused_decoder`.
Owns which models can be rewritten, and the check of each rewrite: every layer, and the head, must
say what the untouched one says in float32, within what the type of the weights allows. Whatever is
not known, or does not pass, runs untouched; on a GPU by what `fused` can still replace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from gpu_worker.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    KVShape,
    LayerAttention,
    PagedBackend,
    StaticBackend,
)
from gpu_worker.attention.cpu import CpuAttention
from gpu_worker.attention.dense import attend_causal
from gpu_worker.decoder import DecoderLayer, DecoderWeights, NativeDecoder
from gpu_worker.families import FAMILIES
from gpu_worker.model_loader import ATTENTION_NAME, Decoder, LoadedModel
from gpu_worker.native import packing
from gpu_worker.native.library import NoLibraryError
from gpu_worker.native.memory import Pages
from gpu_worker.native.packing import HALF, PackedLinear, interleaved
from wire.config import Settings, SettingsError

log = structlog.get_logger()

# Largest error of what a layer adds, relative to its size.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.int8: 0.15}

_NUM_CHECKED = 20  # tokens that the check runs


class CannotPrepareError(Exception):
    """The model stays as it is; the text says why."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Largest errors relative to float32 of what is computed with the same stock weights."""

    layers: float
    logits: float


class RewrittenDecoder(Decoder, Protocol):
    """A decoder that can be checked layer by layer; hidden states are (T, hidden) float32."""

    stream_dtype: torch.dtype
    """Of the residual stream: what a layer adds is rounded to that where it is added."""

    def run_layer(
        self, layer: int, hidden: Tensor, positions: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """Hidden states after one layer."""

    def run_head(self, hidden: Tensor, positions: Tensor, backend: AttentionBackend) -> Tensor:
        """Logits (T, vocab) float32."""


def prepare(settings: Settings, model: LoadedModel, backend: PagedBackend) -> LoadedModel:
    """Rewrite a model if it is known, and the backend has a decoder; else leave it.

    Raises:
        SettingsError: QUANTIZATION or BATCH_INVARIANT asks for what only a rewritten model can do.

    """
    try:
        return _rewritten(settings, model, backend)
    except (CannotPrepareError, NoLibraryError) as error:
        reason = str(error)  # the error itself would keep alive what the attempt has made
    if settings.quantization != "none":
        raise SettingsError(f"QUANTIZATION={settings.quantization}: {reason}")
    if settings.batch_invariant:
        raise SettingsError(f"BATCH_INVARIANT=1: {reason}")
    log.warning("model_not_rewritten", reason=reason)
    if isinstance(backend, StaticBackend):
        from gpu_worker.fused import fuse  # noqa: PLC0415 - Triton is not everywhere

        fuse(model)
    return model


def _rewritten(settings: Settings, model: LoadedModel, backend: PagedBackend) -> LoadedModel:
    _refuse_unknown(model)
    try:
        decoder, cache = _decoder_for(settings, model, backend)
        accuracy = check(decoder, model, settings, cache)
    except (ValueError, torch.OutOfMemoryError) as error:  # a kernel refuses a size
        raise CannotPrepareError(str(error)) from None
    log.info(
        "model_rewritten",
        quantization=settings.quantization,
        error_of_layers=round(accuracy.layers, 5),
        error_of_logits=round(accuracy.logits, 5),
    )
    model.module.model.layers = nn.ModuleList()  # the decoder has what it needs of them
    return replace(model, decoder=decoder)


def _decoder_for(
    settings: Settings, model: LoadedModel, backend: PagedBackend
) -> tuple[RewrittenDecoder, PagedBackend]:
    """A decoder for this backend, and an empty cache of its kind to check it with."""
    if isinstance(backend, CpuAttention):
        kernels = settings.model_cache_dir / "kernels"
        kind = torch.int8 if settings.quantization == "int8" else model.dtype
        native = NativeDecoder(
            extract(model, kind),
            kernels,
            max_tokens=max(settings.max_num_batched_tokens, _NUM_CHECKED),
            is_invariant=settings.batch_invariant,
        )
        return native, CpuAttention(settings.block_size, model.dtype, kernels)
    if isinstance(backend, StaticBackend):
        # Triton is not everywhere.
        from gpu_worker.attention.triton import TritonAttention  # noqa: PLC0415
        from gpu_worker.fused_decoder import FusedDecoder  # noqa: PLC0415

        fused = FusedDecoder(model, torch.cat(rotary_table(model), dim=1))
        return fused, TritonAttention(settings.block_size, model.dtype, model.device)
    raise CannotPrepareError("attention in plain torch has no decoder")


# ---------------------------------------------------------------- what a model consists of


def rotary_table(model: LoadedModel) -> tuple[Tensor, Tensor]:
    """Cosines and sines (max_model_len, head_dim / 2), float32."""
    module = model.module
    positions = torch.arange(model.max_model_len, device=model.device)
    zero = torch.zeros(1, device=model.device)  # tells device and dtype
    half = module.model.layers[0].self_attn.head_dim // 2
    cos, sin = module.model.rotary_emb(zero, positions[None])
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def extract(model: LoadedModel, kind: torch.dtype) -> DecoderWeights:
    """Pack the weights of a model of a known family.

    Raises CannotPrepareError for sizes or biases that the decoder in C++ does not know.
    """
    module, config = model.module, model.module.config
    odd = [n for n in (config.hidden_size, config.intermediate_size) if n % HALF]
    if odd or model.kv_shapes[0].key_dim % 2:
        raise CannotPrepareError(f"a size is no multiple of {HALF}")
    if any(layer.mlp.gate_proj.bias is not None for layer in module.model.layers):
        raise CannotPrepareError("its MLP has biases")
    pack = partial(packing.pack, kind=kind, pages=Pages())
    cos, sin = rotary_table(model)
    return DecoderWeights(
        layers=[
            _layer(layer, how.sliding_window or 0, pack)
            for layer, how in zip(module.model.layers, model.attention, strict=True)
        ],
        embedding=module.model.embed_tokens.weight.detach(),
        norm=_floats(module.model.norm),
        head=pack(module.lm_head.weight, module.lm_head.bias),
        cos=cos,
        sin=sin,
        intermediate=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=module.model.layers[0].self_attn.head_dim,
        eps=config.rms_norm_eps,
        scale=model.attention[0].scale,
        kind=kind,
    )


def _refuse_unknown(model: LoadedModel) -> None:
    kind, config = type(model.module), model.module.config
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers."):
        known = ", ".join(sorted(FAMILIES))
        raise CannotPrepareError(f"{kind.__name__} is not among {known} of transformers")
    if config.hidden_act != "silu":
        raise CannotPrepareError(f"its activation is {config.hidden_act}, not silu")
    if any(how.softcap is not None or how.sinks is not None for how in model.attention):
        raise CannotPrepareError("it attends with a soft cap or sinks")
    linears = [linear for layer in model.module.model.layers for linear in _linears(layer)]
    if any(type(linear) is not nn.Linear for linear in linears):
        raise CannotPrepareError("its products are no plain ones: they are quantised, perhaps")


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    of_attention = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*of_attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _layer(layer: Any, window: int, pack: Callable[..., PackedLinear]) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias = projections[0].bias is not None
    bias = torch.cat([p.bias for p in projections]) if has_bias else None
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


def check(
    decoder: RewrittenDecoder, model: LoadedModel, settings: Settings, cache: PagedBackend
) -> Accuracy:
    """Compare each layer, and the head, with the untouched model. CannotPrepareError if one fails.

    Both get what the untouched layer before made, so errors do not add up. The cache becomes that
    of one sequence.
    """
    module = model.module
    tolerance = TOLERANCES[torch.int8 if settings.quantization == "int8" else model.dtype]
    num_tokens = min(_NUM_CHECKED, model.max_model_len)
    positions = torch.arange(num_tokens, device=model.device)
    _begin_one_sequence(cache, model, positions, settings.block_size)
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
        errors.append(_error_of_layer(found, expected, hidden, decoder.stream_dtype))
        if not errors[-1] <= tolerance:
            raise CannotPrepareError(f"layer {i} is off by {errors[-1]:.2g} when it is rewritten")
        hidden = expected.to(decoder.stream_dtype).float()  # what it can be given exactly
    normed = copy.deepcopy(module.model.norm).float()(hidden).to(model.dtype)
    found, expected = decoder.run_head(hidden, positions, cache), module.lm_head(normed).float()
    error = float((found - expected).norm() / expected.norm())
    if not error <= tolerance:
        raise CannotPrepareError(f"the logits are off by {error:.2g} when they are rewritten")
    return Accuracy(max(errors), error)


def _error_of_layer(
    found: Tensor, expected: Tensor, hidden: Tensor, stream_dtype: torch.dtype
) -> float:
    """Error of what a layer adds to hidden (T, hidden), relative to its size.

    But for what two roundings of the sum explain, each by half the distance between two numbers: to
    the few very large numbers that real models have in their stream nothing small can be added.
    """
    explained = torch.finfo(stream_dtype).eps * torch.maximum(hidden.abs(), expected.abs())
    off = ((found - expected).abs() - explained).clamp(min=0)
    return float(off.norm() / (expected - hidden).norm())


def _begin_one_sequence(
    cache: PagedBackend, model: LoadedModel, positions: Tensor, block_size: int
) -> None:
    """Let the cache hold one sequence, at the start of a step that has all of its tokens."""
    num_tokens = len(positions)
    num_blocks = -(-num_tokens // block_size)
    cache.alloc_kv(model.kv_shapes, num_blocks)
    starts, lens = np.array([0, num_tokens]), np.array([num_tokens])
    blocks = torch.arange(num_blocks, device=model.device)
    cache.begin_step(AttentionMetadata(starts, lens, positions, blocks[None]))
