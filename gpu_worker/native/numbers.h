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
inline vec load(const uint16_t *p) {
    hvec h;
    memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, uvec) << 16);
}
inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
inline void store(uint16_t *p, vec v) {
    for (int i = 0; i < VL; i++) put(p + i, v[i]);
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
    return pick(y < all(0.f), e / (1.f + e), 1.f / (1.f + e));
}
inline ivec turned(int by) {  // lanes, `by` places further
    ivec lanes;
    for (int i = 0; i < VL; i++) lanes[i] = (i + by) % VL;
    return lanes;
}
inline float max_of(vec v) {  // of those that are numbers
    for (int half = VL / 2; half > 0; half /= 2) {
        const vec other = __builtin_shuffle(v, turned(half));
        v = pick((other > v) | (v != v), other, v);
    }
    return v[0];
}
inline float sum_of(vec v) {
    for (int half = VL / 2; half > 0; half /= 2) v += __builtin_shuffle(v, turned(half));
    return v[0];
}

}  // namespace
