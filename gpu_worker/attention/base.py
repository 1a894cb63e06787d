"""What attention must know of a step, and what an attention backend does.

Owns the vocabulary between the model and the backends. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one token in one layer."""

    num_kv_heads: int  # HK
    key_dim: int  # DK
    value_dim: int  # DV

    @property
    def num_elements(self) -> int:
        """Numbers that a token takes in this layer's cache."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step: T query tokens of S sequences, packed without padding, each sequence in one piece.

    Sequence i has the query tokens [query_start_loc[i], query_start_loc[i + 1]). They are the last
    of its seq_lens[i] tokens. Position p of it is in block block_tables[i, p // block_size], and
    what stands in a block table beyond its last block means nothing.
    """

    query_start_loc: IntArray  # (S + 1,) on the host: planning never waits for the device
    seq_lens: IntArray  # (S,) on the host
    slot_mapping: Tensor  # (T,) int64: block id * block_size + offset, where a token's K, V belong
    block_tables: Tensor  # (S, B) int64
    num_decodes: int = 0  # the first of S: no other sequence sees their new tokens in this step


@dataclass(frozen=True, slots=True)
class StaticDecodes:
    """B sequences of one query token each, in tensors that never move: a CUDA graph reads them.

    A sequence of padding has the length 0 and the slot -1. What the tensors hold when attention
    is captured means nothing.
    """

    slot_mapping: Tensor  # (B,) int64
    seq_lens: Tensor  # (B,) int32
    block_tables: Tensor  # (B, C) int32
    work_starts: Mapping[int, Tensor]  # by sliding window, 0 for none: see kernels.decode_plan
    max_items: int  # pieces that attention has room for


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends, as the model says with each call."""

    scale: float
    sliding_window: int | None = None  # a query at p sees the keys (p - window, p]
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    sinks: Tensor | None = None  # (HQ,): a score that takes part in the softmax and has no value


class AttentionBackend(Protocol):
    """Holds the cache of all layers in a layout of its own, and attends to it.

    Within a layer `write` comes before `attend`, so what a step computes and what was cached before
    are read alike. One step at a time.
    """

    def alloc_kv(self, shapes: Sequence[KVShape], num_blocks: int) -> None:
        """Make the cache: `num_blocks` blocks of every layer."""

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """The blocks of a layer, K and V, in whatever layout: (num_blocks, …)."""

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of a step share."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store key (HK, T, DK) and value (HK, T, DV) where the slot mapping says; nothing else."""

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        """Attend with query (HQ, T, DK); returns (T, HQ, DV)."""


class PagedBackend(AttentionBackend, Protocol):
    """A backend whose cache is in blocks, which can be copied."""

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """The blocks of a layer, K and V; the first dimension of both is the block."""


@runtime_checkable
class StaticBackend(PagedBackend, Protocol):
    """A backend of a GPU: it waits for no device, and a CUDA graph can hold what it does."""

    def begin_static_step(self, decodes: StaticDecodes) -> None:
        """Prepare a step like `begin_step`, of which the host knows no number."""


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: AttentionBackend,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attend as the models of transformers ask: query (1, HQ, T, DK) to (1, T, HQ, DV).

    `paged` travels through the forward as a keyword; what a mask would say is in its metadata.
    Raises NotImplementedError for what a backend could not know.
    """
    if attention_mask is not None or position_bias is not None:
        raise NotImplementedError("attention with a mask or a position bias of the model's own")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError("attention to later tokens")
    how = LayerAttention(scaling, sliding_window, softcap, s_aux)
    paged.write(module.layer_idx, key[0], value[0])
    return paged.attend(module.layer_idx, query[0], how).unsqueeze(0), None
