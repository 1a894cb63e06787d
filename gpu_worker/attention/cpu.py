"""Paged attention on the CPU by a kernel of our own: reads the blocks where they are.

Owns the cache in that kernel's layout: K (num_blocks, HK, block_size / 16, DK, 16), so that the
scores of 16 tokens lie side by side in a register, and V (num_blocks, HK, block_size, DV). Of
bfloat16, pairs that one instruction takes lie side by side in both (native/attention.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata, KVShape, LayerAttention
from gpu_worker.native import library, memory
from gpu_worker.native.library import NoLibraryError

GROUP = 16  # tokens that lie side by side

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_int64, _float, _address = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Step(ctypes.Structure):
    """`Step` of native/attention.h."""

    _fields_ = (
        *((name, _address) for name in ("query_start_loc", "seq_lens", "slots", "block_tables")),
        *((name, _int64) for name in ("num_seqs", "num_tokens", "table_stride", "num_heads")),
        *((name, _int64) for name in ("num_kv_heads", "block_size", "num_decodes")),
    )


class CpuAttention:
    """The fast backend of a CPU worker. See `AttentionBackend` for what its methods promise.

    Raises NoLibraryError where the kernel cannot be had: when made, or from `prepare`.
    """

    def __init__(self, block_size: int, dtype: torch.dtype, cache_dir: Path) -> None:
        if dtype not in _NAMES:
            raise NoLibraryError(f"{dtype} is not among {', '.join(_NAMES.values())}")
        if block_size % GROUP:
            raise NoLibraryError(f"BLOCK_SIZE={block_size} is no multiple of {GROUP}")
        self._block_size = block_size
        self._dtype = dtype
        self._cache_dir = cache_dir
        self._shapes: list[KVShape] = []
        self._caches: list[tuple[Tensor, Tensor]] = []
        self._libraries: dict[tuple[int, int], ctypes.CDLL] = {}
        self._metadata: AttentionMetadata | None = None
        self._step = Step()

    def prepare(self, shapes: Sequence[KVShape]) -> None:
        """Compile or load the kernel for these layers. Raises NoLibraryError."""
        for shape in shapes:
            self._library(shape)

    def alloc_kv(self, shapes: Sequence[KVShape], num_blocks: int) -> None:
        """Make the cache. Memory that was never written may hold anything."""
        self.prepare(shapes)
        self._caches.clear()  # before the new one is made: both may not fit
        self._shapes = list(shapes)
        for shape in shapes:
            heads, size = shape.num_kv_heads, self._block_size
            key = (num_blocks, heads, size // GROUP, shape.key_dim, GROUP)
            value = (num_blocks, heads, size, shape.value_dim)
            made = (memory.empty(key, self._dtype), memory.empty(value, self._dtype))
            self._caches.append(made)

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """The blocks of a layer, K and V, in the kernel's layout."""
        return self._caches[layer]

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Give the kernel the addresses of what all layers share."""
        self._metadata = metadata  # keeps what is pointed to alive
        tables = metadata.block_tables
        step = self._step
        step.query_start_loc = torch.from_numpy(metadata.query_start_loc).data_ptr()
        step.seq_lens = torch.from_numpy(metadata.seq_lens).data_ptr()
        step.slots = metadata.slot_mapping.data_ptr()
        step.block_tables = tables.data_ptr()
        step.num_seqs, step.num_tokens = len(metadata.seq_lens), metadata.slot_mapping.shape[0]
        step.table_stride = tables.stride(0)
        step.block_size = self._block_size
        step.num_decodes = metadata.num_decodes

    def step(self, num_heads: int, num_kv_heads: int) -> Step:
        """Addresses of this step, for C++ that attends and writes by itself."""
        self._step.num_heads, self._step.num_kv_heads = num_heads, num_kv_heads
        return self._step

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store key (HK, T, DK) and value (HK, T, DV) by the slot mapping."""
        key, value = _dense_rows(key), _dense_rows(value)
        keys, values = self._caches[layer]
        self._step.num_kv_heads = key.shape[0]
        self._function("write", layer)(
            ctypes.byref(self._step),
            _address(key.data_ptr()),
            _int64(key.stride(1)),
            _int64(key.stride(0)),
            _address(value.data_ptr()),
            _int64(value.stride(1)),
            _int64(value.stride(0)),
            _address(keys.data_ptr()),
            _address(values.data_ptr()),
        )

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        """Attend with query (HQ, T, DK); returns (T, HQ, DV)."""
        query = _dense_rows(query)
        keys, values = self._caches[layer]
        num_heads, num_tokens, _ = query.shape
        out = query.new_empty(num_tokens, num_heads, self._shapes[layer].value_dim)
        sinks = how.sinks.float().contiguous() if how.sinks is not None else None
        self._step.num_heads, self._step.num_kv_heads = num_heads, self._shapes[layer].num_kv_heads
        self._function("attend", layer)(
            ctypes.byref(self._step),
            _address(query.data_ptr()),
            _int64(query.stride(1)),
            _int64(query.stride(0)),
            _address(keys.data_ptr()),
            _address(values.data_ptr()),
            _float(how.scale),
            _int64(how.sliding_window or 0),
            _float(how.softcap or 0.0),
            _address(sinks.data_ptr() if sinks is not None else None),
            _address(out.data_ptr()),
        )
        return out

    def _library(self, shape: KVShape) -> ctypes.CDLL:
        sizes = shape.key_dim, shape.value_dim
        if sizes not in self._libraries:
            self._libraries[sizes] = library.load(
                "attention", self._cache_dir, DK=shape.key_dim, DV=shape.value_dim
            )
        return self._libraries[sizes]

    def _function(self, name: str, layer: int) -> ctypes._NamedFuncPointer:
        return getattr(self._library(self._shapes[layer]), f"{name}_{_NAMES[self._dtype]}")  # type: ignore[no-any-return]  # a CDLL has no types


def _dense_rows(heads: Tensor) -> Tensor:
    """(H, T, D) as it is, if the numbers of a token and head lie together."""
    return heads if heads.stride(2) == 1 else heads.contiguous()
