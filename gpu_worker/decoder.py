"""Decoders of the Llama kind in C++ (native/decoder.cpp): a whole forward is one call.

Owns packed weights, the rotary table, the memory of a forward and the number of its threads. How
the weights come out of a loaded model is `prepare`'s business.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.cpu import CpuAttention, Step
from gpu_worker.native import library, memory
from gpu_worker.native.packing import COLS, LinearStruct, PackedLinear
from gpu_worker.thread_choice import ThreadChoice

FEW_TOKENS = 8
"""The most of a step that may wait for the memory more than it computes."""

# What decodes rotate and write counts as attention.
PHASES = ("matrix products", "attention", "rotary and cache write", "norms and rest")

_C_TYPES = {torch.float32: "float", torch.bfloat16: "uint16_t", torch.int8: "int8_t"}
_int64, _float, _address = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; those of norms are float32."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear  # interleaved
    down: PackedLinear
    window: int  # 0: none


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A decoder, and all that its arithmetic depends on."""

    layers: Sequence[DecoderLayer]
    embedding: Tensor  # (vocab, hidden)
    norm: Tensor
    head: PackedLinear
    cos: Tensor  # (positions, head_dim / 2) float32
    sin: Tensor
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    kind: torch.dtype  # of the packed weights


class _Layer(ctypes.Structure):
    """`LayerWeights` of decoder.cpp."""

    _fields_ = (
        *((name, _address) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, LinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _address) for name in ("keys", "values")),
        ("window", _int64),
    )


class _Decoder(ctypes.Structure):
    """`Decoder` of decoder.cpp."""

    _fields_ = (
        *((n, _int64) for n in ("hidden", "intermediate", "num_heads", "num_kv_heads", "vocab")),
        *((name, _address) for name in ("cos", "sin", "layers", "embedding", "norm")),
        ("head", LinearStruct),
        *((name, _float) for name in ("eps", "scale")),
    )


class _Work(ctypes.Structure):
    """`Work` of decoder.cpp."""

    _fields_ = (
        *((name, _address) for name in ("token_ids", "positions", "logits_indices")),
        ("num_logits", _int64),
        *((name, _address) for name in ("logits", "x", "arena")),
        *((name, _int64) for name in ("max_tokens", "first_layer", "last_layer")),
        ("seconds", _address),
        *((name, _int64) for name in ("has_tiles", "is_invariant", "num_threads")),
    )


class NativeDecoder:
    """Runs steps of up to `max_tokens` tokens.

    With `is_invariant` a token's logits are the same bits whatever else is in the step. Raises
    NoLibraryError where it cannot be compiled.
    """

    stream_dtype = torch.float32

    def __init__(
        self,
        weights: DecoderWeights,
        cache_dir: Path,
        *,
        max_tokens: int,
        is_invariant: bool = False,
    ) -> None:
        self._weights = weights
        self._library = library.load(
            "decoder",
            cache_dir,
            DK=weights.head_dim,
            DV=weights.head_dim,
            MODEL_TYPE=_C_TYPES[weights.embedding.dtype],
            WEIGHT_TYPE=_C_TYPES[weights.kind],
        )
        self._library.arena_size.restype = _int64
        most = int(self._library.most_threads())
        counts = [*(n for n in (1, 2, 4, 8, 16, 32) if n < most), most]
        self._for_decodes = [ThreadChoice(counts) for _ in range(FEW_TOKENS)]  # of 1 token, 2, …
        self._for_others = ThreadChoice([most])
        self._layers = (_Layer * len(weights.layers))(*map(_layer_struct, weights.layers))
        self._decoder = _decoder_struct(weights, self._layers)
        self._bound_to: int | None = None  # address of the cache that the layers point to
        hidden = weights.embedding.shape[1]
        self._x = torch.zeros(max_tokens, -(-hidden // COLS) * COLS)
        self._work = _Work(
            max_tokens=max_tokens,
            has_tiles=self._library.has_tiles(),
            is_invariant=is_invariant,
        )
        self._seconds = (ctypes.c_double * len(PHASES))()
        self._work.seconds = ctypes.addressof(self._seconds)
        size = self._library.arena_size(*map(ctypes.byref, (self._decoder, Step(), self._work)))
        self._arena = memory.empty([size + 64], torch.uint8)  # fresh pages are zeros
        self._work.x = self._x.data_ptr()
        self._work.arena = -(-self._arena.data_ptr() // 64) * 64

    def use_threads(self, *, few: Sequence[int], most: int) -> None:
        """Run small steps of decodes with one of so many threads, and all others with so many."""
        self._for_decodes = [ThreadChoice(few) for _ in range(FEW_TOKENS)]
        self._for_others = ThreadChoice([most])

    def threads_for(self, num_tokens: int, num_decodes: int) -> ThreadChoice:
        """How the number of threads is chosen for a step of so many tokens and decodes."""
        if num_decodes == num_tokens <= FEW_TOKENS:
            return self._for_decodes[num_tokens - 1]
        return self._for_others

    def use_vectors(self) -> None:
        """Leave the tiles alone, as where the processor has none."""
        self._work.has_tiles = False

    def seconds(self) -> dict[str, float]:
        """Time of all forwards so far, by what it was spent on."""
        return dict(zip(PHASES, self._seconds, strict=True))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logits_indices: Tensor,
        backend: AttentionBackend,
    ) -> Tensor:
        """Run tokens (T,) at positions (T,); logits (N, vocab) float32 of those at indices (N,)."""
        work = self._work
        work.token_ids = token_ids.data_ptr()
        logits = self._head_of(logits_indices)
        self._run(positions, backend, 0, len(self._weights.layers))
        return logits

    def run_layer(
        self, layer: int, hidden: Tensor, positions: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """Hidden states (T, hidden) float32 after one layer."""
        self._work.token_ids, self._work.num_logits = None, 0
        self._hidden(len(hidden)).copy_(hidden)
        self._run(positions, backend, layer, layer + 1)
        return self._hidden(len(hidden)).clone()

    def run_head(self, hidden: Tensor, positions: Tensor, backend: AttentionBackend) -> Tensor:
        """Logits (T, vocab) of hidden states (T, hidden)."""
        self._work.token_ids = None
        self._hidden(len(hidden)).copy_(hidden)
        rows = torch.arange(len(hidden))
        logits = self._head_of(rows)
        self._run(positions, backend, 0, 0)
        return logits

    def _hidden(self, num_tokens: int) -> Tensor:
        return self._x[:num_tokens, : self._weights.embedding.shape[1]]

    def _head_of(self, rows: Tensor) -> Tensor:
        """Have the logits of rows (N,) computed into the tensor that is returned."""
        num_rows = rows.shape[0]
        assert num_rows <= self._work.max_tokens, "the memory of a forward is for so many rows"
        logits = torch.empty(num_rows, self._decoder.vocab)
        self._work.logits_indices, self._work.num_logits = rows.data_ptr(), num_rows
        self._work.logits = logits.data_ptr()
        return logits

    def _run(self, positions: Tensor, backend: AttentionBackend, first: int, last: int) -> None:
        assert isinstance(backend, CpuAttention), "both read the cache in one layout"
        self._bind(backend)
        work = self._work
        work.positions, work.first_layer, work.last_layer = positions.data_ptr(), first, last
        step = backend.step(self._weights.num_heads, self._weights.num_kv_heads)
        threads = self.threads_for(step.num_tokens, step.num_decodes)
        work.num_threads = threads.count
        started = time.perf_counter()
        self._library.forward(*map(ctypes.byref, (self._decoder, step, work)))
        threads.note(time.perf_counter() - started)

    def _bind(self, backend: CpuAttention) -> None:
        """Let the layers point to the blocks of this cache."""
        address = backend.cache(0)[0].data_ptr()
        if address == self._bound_to:
            return
        for i, layer in enumerate(self._layers):
            keys, values = backend.cache(i)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._bound_to = address


def _layer_struct(layer: DecoderLayer) -> _Layer:
    norms = (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
    linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
    addresses = (None if norm is None else norm.data_ptr() for norm in norms)
    return _Layer(*addresses, *(linear.struct() for linear in linears), window=layer.window)


def _decoder_struct(weights: DecoderWeights, layers: ctypes.Array[_Layer]) -> _Decoder:
    vocab, hidden = weights.embedding.shape
    tables = (weights.cos.data_ptr(), weights.sin.data_ptr())
    return _Decoder(
        *(hidden, weights.intermediate, weights.num_heads, weights.num_kv_heads, vocab),
        *(*tables, ctypes.addressof(layers)),
        *(weights.embedding.data_ptr(), weights.norm.data_ptr(), weights.head.struct()),
        *(weights.eps, weights.scale),
    )
