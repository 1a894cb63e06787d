"""The keys and values of one layer in blocks, and what every launcher demands of its operands.

block table of a sequence     3 7 5 . .        what stands beyond its last block means nothing
position p                    slot p % P of block table[p // P]
key pool (NB, HK, P, DK)      the P tokens of a head lie together: one stretch of P * DK numbers
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.target import arch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
INDICES = (torch.int32, torch.int64)

_NO_E4M3 = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_87")
_BLOCK_SIZES = (16, 32, 64, 128)
_LARGEST_HEAD = 256
_ROW_ALIGNMENT = (
    16  # bytes that one load instruction moves; without it a kernel is many times slower
)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """Keys and values of one layer. Raises ValueError if kernels could not use them.

    What is stored is the real number divided by the scale: one number each, on the device, so that
    nothing waits for it. Only float8 pools have scales.
    """

    key: Tensor  # (NB, HK, P, DK)
    value: Tensor  # (NB, HK, P, DV)
    key_scale: Tensor | None = None  # (1,) float32
    value_scale: Tensor | None = None  # (1,) float32

    def __post_init__(self) -> None:
        num_blocks, num_kv_heads, block_size, _ = self.key.shape
        check("key pool", self.key, (num_blocks, num_kv_heads, block_size, None), FLOATS + FLOAT8)
        check(
            "value pool", self.value, (num_blocks, num_kv_heads, block_size, None), FLOATS + FLOAT8
        )
        check_rows("key pool", self.key)
        check_rows("value pool", self.value)
        if self.key.dtype != self.value.dtype:
            raise ValueError(f"keys are {self.key.dtype}, but values are {self.value.dtype}")
        if block_size not in _BLOCK_SIZES:
            raise ValueError(f"blocks of {block_size} tokens: {_BLOCK_SIZES} are possible")
        for name, dim in (("key", self.key_dim), ("value", self.value_dim)):
            if not 8 <= dim <= _LARGEST_HEAD or dim % 8:
                raise ValueError(f"{name}s of {dim} numbers: multiples of 8 up to 256 are possible")
        for name, scale in (("key", self.key_scale), ("value", self.value_scale)):
            if (scale is not None) != self.is_float8:
                raise ValueError(f"{name} scale: a float8 cache has one, and no other has")
            if scale is not None:
                check(f"{name} scale", scale, (1,), (torch.float32,))
        if self.key.dtype == torch.float8_e4m3fn and arch(self.key.device) in _NO_E4M3:
            raise ValueError("this GPU does not convert float8_e4m3fn; float8_e5m2 is possible")

    @property
    def num_kv_heads(self) -> int:
        """HK."""
        return self.key.shape[1]

    @property
    def block_size(self) -> int:
        """P, in tokens."""
        return self.key.shape[2]

    @property
    def key_dim(self) -> int:
        """DK."""
        return self.key.shape[3]

    @property
    def value_dim(self) -> int:
        """DV."""
        return self.value.shape[3]

    @property
    def is_float8(self) -> bool:
        """Whether numbers are stored in one byte."""
        return self.key.dtype in FLOAT8


def float8_of(device: torch.device) -> torch.dtype:
    """The numbers of one byte that the device converts."""
    name = arch(device)
    if name in _NO_E4M3:
        return torch.float8_e5m2
    return torch.float8_e4m3fnuz if name.startswith("gfx94") else torch.float8_e4m3fn


def padded(dim: int) -> int:
    """The size that a kernel takes for `dim` numbers: a power of two, enough for a product."""
    return int(max(16, triton.next_power_of_2(dim)))


def check(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless a tensor is what a kernel takes it for.

    `None` in `shape` is any size. The last dimension is contiguous.
    """
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}; it can be {names}")
    sizes = tuple(tensor.shape)
    if len(sizes) != len(shape) or any(
        wanted not in (None, size) for size, wanted in zip(sizes, shape, strict=True)
    ):
        raise ValueError(f"{name} has the shape {sizes}; it should be {shape}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, but the others are on {device}")
    if not tensor.numel():
        return
    if sizes[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} has the strides {tensor.stride()}; the last should be 1")


def check_rows(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless each row of a tensor starts at a multiple of 16 bytes."""
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size > 1 and stride * tensor.element_size() % _ROW_ALIGNMENT:
            raise ValueError(
                f"{name} has the strides {tensor.stride()}: its rows should start at multiples "
                f"of {_ROW_ALIGNMENT} bytes"
            )


def check_attention(
    query: Tensor,
    cache: PagedCache,
    block_tables: Tensor,
    num_seqs: int,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Raise ValueError unless query (T, HQ, DK) can attend to a cache, into out (T, HQ, DV)."""
    num_tokens, num_heads, _ = query.shape
    device = query.device
    check("query", query, (None, None, cache.key_dim), FLOATS)
    check("out", out, (num_tokens, num_heads, cache.value_dim), (query.dtype,), device)
    # int64 would be twice as many registers in the inner loop: one program less at a time.
    check("block tables", block_tables, (num_seqs, None), (torch.int32,), device)
    check("key pool", cache.key, (None, None, None, None), FLOATS + FLOAT8, device)
    check_rows("query", query)
    check_rows("out", out)
    if num_heads % cache.num_kv_heads:
        raise ValueError(f"{num_heads} query heads cannot share {cache.num_kv_heads} key heads")
    if not cache.is_float8 and cache.key.dtype != query.dtype:
        raise ValueError(f"the query is {query.dtype}, but the cache is {cache.key.dtype}")
    if sinks is not None:
        check("sinks", sinks, (num_heads,), FLOATS, device)
