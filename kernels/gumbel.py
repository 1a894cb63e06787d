"""Noise for a draw: a pure function of the row's key and the token, without any state.

The token with the largest logit / temperature + noise is a draw from the softmax (the Gumbel-max
trick). The bits are a counter-based hash in wrapping 32-bit arithmetic, the same on every device:

    bits  = murmur3's 32-bit finaliser of token * multiplier + offset
    u     = (the lower 31 bits + 1/2) / 2^31          fine near 0, where the winners are
    noise = -log(-log1p(-u))
"""

from __future__ import annotations

import triton
import triton.language as tl

_ALMOST_ONE = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def gumbel(multiplier: tl.tensor, offset: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Noise (C,) float32 of tokens (C,) int32, for a row's key: two int32."""
    bits = (tokens * multiplier + offset).to(tl.uint32, bitcast=True)
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    bits ^= bits >> 16
    uniform = ((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    return -tl.log(_minus_log1m(tl.minimum(uniform, _ALMOST_ONE)))


@triton.jit
def _minus_log1m(u: tl.tensor) -> tl.tensor:
    """-log(1 - u), right to the last bits for small u too, where a GPU's log of 1 - u is not.

    Twice the series of the inverse hyperbolic tangent at z = u / (2 - u); beyond 1/4 the plain log.
    """
    z = u / (2.0 - u)
    square = z * z
    series = 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    series = 2.0 * z * (series * square + 1.0)
    return tl.where(u < 0.25, series, -tl.log(1.0 - u))
