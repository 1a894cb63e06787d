"""Decoders of the Llama kind in C++ (native/decoder.cpp): a whole forward is one call.

Owns packed weights, the rotary table and the memory of a forward. How they come out of a loaded
model is `prepare`'s business.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionBackend
from gpu_worker.attention.cpu import CpuAttention, Step
from gpu_worker.native import library, memory
from gpu_worker.native.packing import COLS, LinearStruct, PackedLinear

# A step of so few tokens waits for the memory alone, and a few threads keep that busy. The others'
# cores are left to whoever needs them, so long as the step takes no longer than this times as long.
_FEW_TOKENS = 4
_SLOWER = 1.1
_TRIALS_S = 0.3  # for finding that out

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
        self._most_threads = self._few_threads = int(self._library.most_threads())
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

    def choose_threads(self, backend: AttentionBackend) -> None:
        """Find by trying how few threads are enough for a step of few tokens.

        The cache gets a token at position 0.
        """
        nothing = torch.zeros(1, dtype=torch.int64)
        counts = [n for n in (1, 2, 4, 8, 16, 32) if n < self._most_threads]
        counts.append(self._most_threads)
        fastest = dict.fromkeys(counts, math.inf)
        deadline = time.perf_counter() + _TRIALS_S
        while len(counts) > 1 and time.perf_counter() < deadline:
            for self._few_threads in counts:  # by turns: what disturbs one disturbs all
                started = time.perf_counter()
                self.forward(nothing, nothing, nothing, backend)
                seconds = time.perf_counter() - started
                fastest[self._few_threads] = min(fastest[self._few_threads], seconds)
        self._few_threads = fewest(fastest)

    def use_threads(self, *, few: int, most: int) -> None:
        """Run small steps with so many threads, and all others with so many."""
        self._few_threads, self._most_threads = few, most

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
        assert len(rows) <= self._work.max_tokens, "the memory of a forward is for so many rows"
        logits = torch.empty(len(rows), self._decoder.vocab)
        self._work.logits_indices, self._work.num_logits = rows.data_ptr(), len(rows)
        self._work.logits = logits.data_ptr()
        return logits

    def _run(self, positions: Tensor, backend: AttentionBackend, first: int, last: int) -> None:
        assert isinstance(backend, CpuAttention), "both read the cache in one layout"
        self._bind(backend)
        work = self._work
        work.positions, work.first_layer, work.last_layer = positions.data_ptr(), first, last
        is_small = len(positions) <= _FEW_TOKENS
        work.num_threads = self._few_threads if is_small else self._most_threads
        step = backend.step(self._weights.num_heads, self._weights.num_kv_heads)
        self._library.forward(*map(ctypes.byref, (self._decoder, step, work)))

    def _bind(self, backend: CpuAttention) -> None:
        """Let the layers point to the blocks of this cache."""
        address = backend.cache(0)[0].data_ptr()
        if address == self._bound_to:
            return
        for i, layer in enumerate(self._layers):
            keys, values = backend.cache(i)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._bound_to = address


def fewest(seconds: Mapping[int, float]) -> int:
    """The smallest number of threads that takes hardly longer than the fastest does."""
    enough = _SLOWER * min(seconds.values())
    return min(n for n, needed in seconds.items() if needed <= enough)


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
