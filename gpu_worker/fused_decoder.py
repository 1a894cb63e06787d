"""Decoders of the Llama kind on a GPU: a layer is four products, and five kernels between them.

    norm + sum | qkv | rotary, cache write | attention | out | norm + sum | gate, up | silu | down

What a layer adds is added to the residual stream by the next norm, which reads it anyhow, and
queries, keys and values come out of one product. Owns the order of launches. Waits for nothing, so
a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gpu_worker.attention.base import AttentionBackend, LayerAttention
from gpu_worker.attention.triton import TritonAttention
from gpu_worker.fused import FusedMLP, Merged
from gpu_worker.model_loader import LoadedModel
from kernels.head_norms import HeadNorms
from kernels.residual_rmsnorm import residual_rmsnorm


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer, in the type of the model."""

    input_norm: Tensor
    qkv: Merged
    head_norms: HeadNorms | None
    out: nn.Linear
    post_norm: Tensor
    mlp: FusedMLP
    how: LayerAttention


class FusedDecoder:
    """Runs a loaded model of a known family with the weights that it has.

    They stay the model's: merged ones are shared, so that nothing is in memory twice, and what
    does not pass a check can still run as it was.
    """

    def __init__(self, model: LoadedModel, cos_sin: Tensor) -> None:
        """cos_sin (max_model_len, head_dim) float32: cosines, then sines, of half a head each."""
        module = model.module
        self.stream_dtype = model.dtype
        self._eps = float(module.config.rms_norm_eps)
        self._layers = [
            _layer(layer, how, self._eps)
            for layer, how in zip(module.model.layers, model.attention, strict=True)
        ]
        self._embedding = module.model.embed_tokens
        self._norm = module.model.norm.weight
        self._head = module.lm_head
        self._cos_sin = cos_sin
        self._heads = module.config.num_attention_heads, module.config.num_key_value_heads

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        backend: AttentionBackend,
    ) -> Tensor:
        """Run tokens (T,) at positions (T,); logits (N, vocab) of those at indices (N,)."""
        stream = self._embedding(token_ids)
        added = None
        for layer in range(len(self._layers)):
            added = self._run(layer, added, stream, positions, backend)
        assert added is not None, "there are no layers"
        normed = self._normed(added[logits_indices], stream[logits_indices], self._norm)
        logits: Tensor = self._head(normed)
        return logits

    def run_layer(
        self, layer: int, hidden: Tensor, positions: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """Hidden states (T, hidden) float32 after one layer."""
        stream = hidden.to(self.stream_dtype, copy=True)
        added = self._run(layer, None, stream, positions, backend)
        return stream.float() + added.float()

    def run_head(self, hidden: Tensor, positions: Tensor, backend: AttentionBackend) -> Tensor:
        """Logits (T, vocab) of hidden states (T, hidden)."""
        logits: Tensor = self._head(self._normed(None, hidden.to(self.stream_dtype), self._norm))
        return logits.float()

    def _run(
        self,
        layer: int,
        added: Tensor | None,
        stream: Tensor,
        positions: Tensor,
        backend: AttentionBackend,
    ) -> Tensor:
        """What a layer adds, (T, hidden), to the stream, which takes in what was added before."""
        weights = self._layers[layer]
        normed = self._normed(added, stream, weights.input_norm)
        attended: Tensor = weights.out(self._attend(layer, normed, positions, backend))
        down: Tensor = weights.mlp(self._normed(attended, stream, weights.post_norm))
        return down

    def _attend(
        self, layer: int, normed: Tensor, positions: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """(T, hidden) to (T, num_heads * head_dim)."""
        assert isinstance(backend, TritonAttention), "queries are rotated while keys are stored"
        weights, (num_heads, num_kv_heads) = self._layers[layer], self._heads
        heads = weights.qkv(normed).unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        backend.rotate_and_write(
            layer,
            query,
            key,
            value,
            positions=positions,
            cos_sin=self._cos_sin,
            norms=weights.head_norms,
        )
        return backend.attend(layer, query.transpose(0, 1), weights.how).flatten(1)

    def _normed(self, added: Tensor | None, stream: Tensor, weight: Tensor) -> Tensor:
        if added is None:
            return residual_rmsnorm(stream, None, weight, self._eps)
        return residual_rmsnorm(added, stream, weight, self._eps)


def _layer(layer: Any, how: LayerAttention, eps: float) -> _Layer:
    attention, head_norms = layer.self_attn, None
    if hasattr(attention, "q_norm"):
        head_norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight, eps)
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=Merged([attention.q_proj, attention.k_proj, attention.v_proj]),
        head_norms=head_norms,
        out=attention.o_proj,
        post_norm=layer.post_attention_layernorm.weight,
        mlp=FusedMLP(layer.mlp),
        how=how,
    )
