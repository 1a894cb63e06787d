// Vectors of VL numbers, and the numbers that are kept in memory: float, and bfloat16 as uint16_t.
//
// VL is the number of floats in a vector register of this machine (see library.py).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

constexpr float LOG2E = 1.44269504f;
constexpr float NONE = -INFINITY;

typedef float vec __attribute__((vector_size(VL * 4)));
typedef int32_t ivec __attribute__((vector_size(VL * 4)));
typedef uint32_t uvec __attribute__((vector_size(VL * 4)));
typedef uint8_t bvec __attribute__((vector_size(VL)));
typedef uint16_t hvec __attribute__((vector_size(VL * 2)));

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) {  // bfloat16: the upper half of a float
    uint32_t bits = uint32_t(x) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
inline void put(float *p, float v) { *p = v; }
inline void put(uint16_t *p, float v) {  // round to nearest even
    uint32_t bits;
    memcpy(&bits, &v, 4);
    *p = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
inline vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
// Compilers turn a change of width into several instructions where there is one, so it is named.
#if VL == 16 && defined(__AVX512F__)
inline uvec widened(hvec h) { return (uvec)_mm512_cvtepu16_epi32((__m256i)h); }
inline hvec halved(uvec v) { return (hvec)_mm512_cvtepi32_epi16((__m512i)v); }
inline bvec quartered(uvec v) { return (bvec)_mm512_cvtepi32_epi8((__m512i)v); }
#else
inline uvec widened(hvec h) { return __builtin_convertvector(h, uvec); }
inline hvec halved(uvec v) { return __builtin_convertvector(v, hvec); }
inline bvec quartered(uvec v) { return __builtin_convertvector(v, bvec); }
#endif
inline vec load(const uint16_t *p) {
    hvec h;
    memcpy(&h, p, sizeof h);
    return (vec)(widened(h) << 16);
}
inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
inline void store(uint16_t *p, vec v) {  // as `put` rounds
    const uvec bits = (uvec)v, none = (uvec)(v != v);
    const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const hvec h = halved((rounded & ~none) | (none & 0x7fc0));
    memcpy(p, &h, sizeof h);
}
inline vec all(float x) { return vec{} + x; }
inline vec pick(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }

inline vec exp2v(vec x) {  // x <= 0; relative error < 2e-7 (Taylor, degree 6, on [-0.5, 0.5])
    x = pick(x < all(-126.f), all(-126.f), x);
    ivec n = __builtin_convertvector(x - 0.5f, ivec);
    vec f = x - __builtin_convertvector(n, vec);
    vec p = all(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.f;
    return p * (vec)((n + 127) << 23);
}
inline vec tanhv(vec y) {  // by exp2 of something <= 0, so that nothing overflows
    vec a = pick(y < all(0.f), -y, y);
    vec e = exp2v(a * (-2.f * LOG2E));
    vec t = (1.f - e) / (1.f + e);
    return pick(y < all(0.f), -t, t);
}
inline vec sigmoidv(vec y) {  // likewise
    vec e = exp2v(pick(y < all(0.f), y, -y) * LOG2E);
    const vec share = 1.f / (1.f + e);
    return pick(y < all(0.f), e * share, share);
}
template <int BY>
inline vec turned(vec v) {  // what is BY lanes further on
    ivec lanes;
    for (int i = 0; i < VL; i++) lanes[i] = (i + BY) % VL;
    return __builtin_shuffle(v, lanes);
}
template <int HALF = VL / 2>
inline float max_of(vec v) {  // of those that are numbers
    if constexpr (HALF == 0) {
        return v[0];
    } else {
        const vec other = turned<HALF>(v);
        return max_of<HALF / 2>(pick((other > v) | (v != v), other, v));
    }
}
template <int HALF = VL / 2>
inline float sum_of(vec v) {
    if constexpr (HALF == 0) return v[0];
    else return sum_of<HALF / 2>(v + turned<HALF>(v));
}

}  // namespace
