"""The door to transformers: a model folder becomes a module that attends through a backend.

Owns the choice of device and dtype, and the refusal of models that cannot be served. The models
are transformers' own, unchanged: our attention is registered under a name, and no mask is built
for a name that has none registered. Knows nothing of requests.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog
import torch
import transformers
from torch import Tensor

from gpu_worker.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    KVShape,
    LayerAttention,
    paged_attention,
)
from gpu_worker.families import FAMILIES
from gpu_worker.native.library import AVX2, processor_features
from wire.config import Settings, SettingsError
from wire.service import StartupError

log = structlog.get_logger()

ATTENTION_NAME = "paged"

transformers.AttentionInterface.register(ATTENTION_NAME, paged_attention)
_hf_logging: Any = transformers.logging  # untyped


class Decoder(Protocol):
    """What runs in the place of a stock module."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        backend: AttentionBackend,
    ) -> Tensor:
        """As `LoadedModel.forward`."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model on its device, and what must be known to serve it."""

    module: Any  # transformers has no types
    device: torch.device
    dtype: torch.dtype
    kv_shapes: list[KVShape]  # by layer
    attention: list[LayerAttention]  # by layer
    vocab_size: int  # width of the logits
    max_model_len: int
    decoder: Decoder | None = None  # runs in the module's place, where the model was rewritten

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        backend: AttentionBackend,
    ) -> Tensor:
        """Run tokens (T,) at positions (T,); logits (N, vocab_size) of those at indices (N,)."""
        if self.decoder is not None:
            return self.decoder.forward(token_ids, positions, logits_indices, backend)
        return _forward(self.module, token_ids, positions, logits_indices, backend)


def load_model(settings: Settings, folder: Path) -> LoadedModel:
    """Load a model folder.

    Raises:
        SettingsError: DEVICE, DTYPE or MAX_MODEL_LEN does not suit machine or model.
        StartupError: the model cannot be served; the text says why.

    """
    device = pick_device(settings)
    _hf_logging.set_verbosity_error()
    _hf_logging.disable_progress_bar()
    options = {"local_files_only": True, "trust_remote_code": settings.trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **options)
    except Exception as error:  # transformers raises whatever its parts raise
        raise StartupError(f"{folder} has no configuration that can be read: {error}") from error
    if config.is_encoder_decoder:
        raise StartupError(f"{folder}: encoder-decoder models are not served")
    dtype = pick_dtype(settings, config, device)
    max_model_len = pick_max_model_len(settings, config)
    try:
        module: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=None if settings.allow_pickle_weights else True,
            **options,
        )
        module = module.eval().to(device)
        _check_weights(module, folder)
        kv_shapes, attention, vocab_size = _probe(module, config, device)
    except StartupError:
        raise
    except Exception as error:  # likewise
        raise StartupError(f"{folder} cannot be served: {_first_line(error)}") from error
    return LoadedModel(module, device, dtype, kv_shapes, attention, vocab_size, max_model_len)


def pick_device(settings: Settings) -> torch.device:
    """The device of DEVICE; `auto` takes a GPU where there is one.

    Raises SettingsError if there is none, or if other settings ask for what only the CPU does.
    """
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise SettingsError("DEVICE=cuda: no GPU that torch can use; `auto` and `cpu` work here")
    if not has_cuda or settings.device == "cpu":
        return torch.device("cpu")
    if settings.quantization != "none":
        raise SettingsError(
            f"QUANTIZATION={settings.quantization}: not on a GPU; `none` works here, or DEVICE=cpu"
        )
    if settings.batch_invariant:
        raise SettingsError(
            "BATCH_INVARIANT=1: not on a GPU, whose matrix products depend on the batch; "
            "0 works here, or DEVICE=cpu"
        )
    return torch.device("cuda")


def pick_dtype(settings: Settings, config: Any, device: torch.device) -> torch.dtype:
    """The dtype of DTYPE; `auto`: the checkpoint's where the device is fast at it, else float32.

    For a model that has a decoder of our own it is fast at what that is fast at. Raises
    SettingsError for one that the device lacks.
    """
    lacks_bfloat16 = device.type == "cuda" and torch.bfloat16 not in _fast_dtypes(device)
    if settings.dtype == "bfloat16" and lacks_bfloat16:
        raise SettingsError("DTYPE=bfloat16: this GPU has none; float16 and float32 work here")
    if settings.dtype != "auto":
        chosen = getattr(torch, settings.dtype)
        assert isinstance(chosen, torch.dtype)
        return chosen
    checkpoint: torch.dtype | None = getattr(config, "dtype", None)
    fast = _fast_dtypes(device)
    is_known = not FAMILIES.isdisjoint(getattr(config, "architectures", None) or ())
    if is_known and getattr(config, "quantization_config", None) is None:
        fast |= _fast_dtypes_of_ours(device)
    return checkpoint if checkpoint in fast else torch.float32


def is_fast(model: LoadedModel) -> bool:
    """Whether its device is fast at its dtype, as it runs."""
    fast = {torch.float32} | _fast_dtypes(model.device)
    if model.decoder is not None:
        fast |= _fast_dtypes_of_ours(model.device)
    return model.dtype in fast


def pick_max_model_len(settings: Settings, config: Any) -> int:
    """Longest request: what MAX_MODEL_LEN asks for, and never more than the model was made for."""
    text = config.get_text_config()
    own = getattr(text, "max_position_embeddings", None) or 0
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):  # one for all layers, or one for each kind
        if isinstance(rope, dict) and rope.get("rope_type") in {"dynamic", "longrope"}:
            # Beyond this they depend on the longest request in the batch: answers would, too.
            original = rope.get("original_max_position_embeddings") or own
            own = min(own, getattr(text, "original_max_position_embeddings", None) or original)
    wanted = settings.max_model_len or own
    if not wanted:
        raise SettingsError("MAX_MODEL_LEN: the model does not say how long it can be; set it")
    if own and wanted > own:
        raise SettingsError(f"MAX_MODEL_LEN={wanted}: the model was made for at most {own} tokens")
    return int(wanted)


def _fast_dtypes(device: torch.device) -> set[torch.dtype]:
    if device.type == "cuda":
        has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0)
        return {torch.float16, torch.bfloat16} if has_bfloat16 else {torch.float16}
    return {torch.bfloat16} if {"avx512_bf16", "amx_bf16"} & processor_features() else set()


def _fast_dtypes_of_ours(device: torch.device) -> set[torch.dtype]:
    """What our decoders are fast at besides: on a CPU they widen bfloat16 as they read it."""
    is_vectored = processor_features() >= AVX2
    return {torch.bfloat16} if device.type == "cpu" and is_vectored else set()


@torch.inference_mode()
def _check_weights(module: Any, folder: Path) -> None:
    """Tell of weights that are no numbers. StartupError if most tensors have some.

    A few may be of tokens that nobody uses: whoever meets them is told so, and nobody else.
    """
    weights = dict(module.named_parameters())
    sums = {name: weight.sum(dtype=torch.float32) for name, weight in weights.items()}
    sick = [name for name, total in sums.items() if not total.isfinite()]
    if not sick:
        return
    where = f"{len(sick)} of its {len(weights)} tensors, {sick[0]} among them"
    if 2 * len(sick) > len(weights):
        raise StartupError(f"{folder}: its weights are not finite, in {where}")
    log.warning("weights_not_finite", where=where)


# ---------------------------------------------------------------- finding out by trying


class _Probe(AttentionBackend):
    """A backend that stores nothing and notes what it is asked for."""

    def __init__(self) -> None:
        self.shapes: dict[int, KVShape] = {}
        self.attention: dict[int, LayerAttention] = {}

    def alloc_kv(self, shapes: Sequence[KVShape], num_blocks: int) -> None: ...

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("nothing is stored")

    def begin_step(self, metadata: AttentionMetadata) -> None: ...

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self.shapes[layer] = KVShape(key.shape[0], key.shape[2], value.shape[2])

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        self.attention[layer] = how
        num_heads, num_tokens, _ = query.shape
        return query.new_zeros(num_tokens, num_heads, self.shapes[layer].value_dim)


def _probe(
    module: Any, config: Any, device: torch.device
) -> tuple[list[KVShape], list[LayerAttention], int]:
    """Run two tokens: what the layers write, how they attend, and the width of the logits."""
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise StartupError(f"{type(module).__name__} cannot compute the logits of chosen tokens")
    probe = _Probe()
    two = torch.arange(2, device=device)
    with torch.inference_mode():
        logits = _forward(module, torch.zeros_like(two), two, two, probe)
    num_layers = config.get_text_config().num_hidden_layers
    if sorted(probe.shapes) != list(range(num_layers)):
        raise StartupError(
            f"{type(module).__name__}: {len(probe.shapes)} of {num_layers} layers attend through "
            "the interface of transformers; models with other layers are not served"
        )
    shapes = [probe.shapes[layer] for layer in range(num_layers)]
    return shapes, [probe.attention[layer] for layer in range(num_layers)], logits.shape[-1]


def _forward(
    module: Any,
    token_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    backend: AttentionBackend,
) -> Tensor:
    output = module(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=logits_indices,
        **{ATTENTION_NAME: backend},
    )
    logits = output.logits[0]
    assert isinstance(logits, Tensor)
    return logits


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
