// Vectors of VL numbers, and the numbers that are kept in memory: float, and bfloat16 as uint16_t.
//
// VL is the number of floats in a vector register of this machine (see library.py).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

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
typedef int16_t svec __attribute__((vector_size(VL * 4)));

// Numbers that lie side by side where products are added up, since one instruction can do with that
// many at once: 1 float, 2 of bfloat16, 4 of int8.
template <class T> constexpr int PACK = 4 / sizeof(T);

// Over a loop whose variables are to stay in registers: arrays do only once it is gone.
#define UNROLLED _Pragma("GCC unroll 64")
#define ROLLED _Pragma("GCC unroll 1")  // which is faster where memory is waited for

// Calls `then` with n, from 1 to MOST, as a constant.
template <int MOST, class Then>
void with_constant(int n, Then then) {
    if constexpr (MOST > 1)
        if (n < MOST) return with_constant<MOST - 1>(n, then);
    then(std::integral_constant<int, MOST>{});
}

// What numbers of T are multiplied with: T if one instruction multiplies packs of them, else float.
#ifdef __AVX512BF16__
template <class T> using Factor = T;
#else
template <class T> using Factor = float;
#endif

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
template <class To, class From>
To as(From x) {
    if constexpr (std::is_same_v<To, From>) return x;
    To y;
    put(&y, to_float(x));
    return y;
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
inline bvec quartered(uvec v) { return __builtin_convertvector(v, bvec); }
#if VL == 8 && defined(__AVX2__)
inline uvec widened(hvec h) { return (uvec)_mm256_cvtepu16_epi32((__m128i)h); }
inline hvec halved(uvec v) {  // of numbers below 2^16
    const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
    return (hvec)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
#else
inline uvec widened(hvec h) { return __builtin_convertvector(h, uvec); }
inline hvec halved(uvec v) { return __builtin_convertvector(v, hvec); }
#endif
#endif
inline vec load(const uint16_t *p) {
    hvec h;
    memcpy(&h, p, sizeof h);
    return (vec)(widened(h) << 16);
}
inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
#if VL == 16 && defined(__AVX512BF16__)
inline void store(uint16_t *p, vec v) {  // as `put` rounds, and what is tiny becomes 0
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
#else
inline void store(uint16_t *p, vec v) {  // as `put` rounds
    const uvec bits = (uvec)v, none = (uvec)(v != v);
    const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const hvec h = halved((rounded & ~none) | (none & 0x7fc0));
    memcpy(p, &h, sizeof h);
}
#endif
inline vec all(float x) { return vec{} + x; }
inline vec pick(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }

// VL packs; `opened`, what they are multiplied as; and `dot`: what that and the one pack at `a` make,
// lane by lane, on top of a sum.
inline vec load_packs(const float *p) { return load(p); }
inline uvec load_packs(const uint16_t *p) {
    uvec v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline ivec load_packs(const int8_t *p) {
    ivec v;
    memcpy(&v, p, sizeof v);
    return v;
}

inline vec opened(vec packs) { return packs; }
inline vec dot(vec sum, const float *a, vec packs) { return sum + packs * *a; }

#ifdef __AVX512BF16__
inline uvec opened(uvec packs) { return packs; }
inline vec dot(vec sum, const uint16_t *a, uvec packs) {
    uint32_t pair;
    memcpy(&pair, a, 4);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)packs);
}
#else
struct Halves {
    vec first, second;
};
inline Halves opened(uvec packs) { return {(vec)(packs << 16), (vec)(packs & 0xffff0000u)}; }
inline vec dot(vec sum, const float *a, Halves packs) {
    sum += packs.first * a[0];
    return sum + packs.second * a[1];
}
#endif

// Activations beside int8, four of which lie in the order in which `opened` has the weights.
#if VL == 16 && defined(__AVX512VNNI__) || VL == 8 && defined(__AVXVNNI__)
using Int8Act = uint8_t;
constexpr bool MULTIPLIES_FOURS = true;
inline ivec opened(ivec packs) { return packs; }
inline ivec dot(ivec sum, const uint8_t *a, ivec packs) {
    int32_t four;
    memcpy(&four, a, 4);
#if VL == 16
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(four), (__m512i)packs);
#else
    return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, _mm256_set1_epi32(four), (__m256i)packs);
#endif
}
inline void put_acts(uint8_t *p, uvec bytes) {
    const bvec narrow = quartered(bytes);
    memcpy(p, &narrow, sizeof narrow);
}
#else
using Int8Act = uint16_t;  // the first, third, second and fourth
constexpr bool MULTIPLIES_FOURS = false;
struct Quarters {  // pairs
    svec even, odd;
};
inline Quarters opened(ivec packs) { return {((svec)packs << 8) >> 8, (svec)packs >> 8}; }
inline ivec madd(svec packs, const uint16_t *pair) {
    int32_t both;
    memcpy(&both, pair, 4);
#if VL == 16 && defined(__AVX512BW__)
    return (ivec)_mm512_madd_epi16((__m512i)packs, _mm512_set1_epi32(both));
#elif VL == 8 && defined(__AVX2__)
    return (ivec)_mm256_madd_epi16((__m256i)packs, _mm256_set1_epi32(both));
#elif VL == 4 && defined(__SSE2__)
    return (ivec)_mm_madd_epi16((__m128i)packs, _mm_set1_epi32(both));
#else
    const ivec lower = (ivec)((uvec)packs << 16) >> 16, upper = (ivec)packs >> 16;
    return lower * int32_t(pair[0]) + upper * int32_t(pair[1]);
#endif
}
inline ivec dot(ivec sum, const uint16_t *a, Quarters packs) {
    sum += madd(packs.even, a);
    return sum + madd(packs.odd, a + 2);
}
inline void put_acts(uint16_t *p, uvec bytes) {
    ivec lanes;
    for (int i = 0; i < VL; i++) lanes[i] = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
    const hvec narrow = halved(__builtin_shuffle(bytes, lanes) & 0xff);
    memcpy(p, &narrow, sizeof narrow);
}
#endif

// 2 to the power of x <= 0; relative error < 3e-7 (Taylor, degree 6, on [-0.5, 0.5]). For x < -126 it
// is anything from 0 to 2^-126, and what is no number stays none.
inline vec exp2v(vec x) {
#if VL == 16 && defined(__AVX512F__)
    x = (vec)_mm512_max_ps((__m512)all(-200.f), (__m512)x);  // of two, the second if it is no number
    const vec n = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
    x = pick(x < all(-126.f), all(-126.f), x);
    const ivec whole = __builtin_convertvector(x - 0.5f, ivec);
    const vec n = __builtin_convertvector(whole, vec);
#endif
    const vec f = x - n;
    vec p = all(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.f;
#if VL == 16 && defined(__AVX512F__)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (vec)((whole + 127) << 23);
#endif
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
inline bool any(ivec lanes) {  // whether a comparison holds in one of them
#if VL == 16 && defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif VL == 8 && defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
    int32_t found = 0;
    for (int i = 0; i < VL; i++) found |= lanes[i];
    return found != 0;
#endif
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
