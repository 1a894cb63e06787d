// Attention as attention/cpu.py calls it: a layer at a time, threads by OpenMP.

#include <omp.h>

#include "attention.h"
#include "team.h"

namespace {

template <class T>
void attend(const Attention<T, T> &attention) {
    const int num_threads = omp_get_max_threads();
    const Items items(attention.step, num_threads);
    Team team(num_threads);
#pragma omp parallel num_threads(num_threads)
    Member(team, nullptr).each(0, items.size(), [&](int64_t i) { attention.attend(items, i); });
}

template <class T>
void write(const Step &step, const T *key, int64_t k_token, int64_t k_head, const T *value,
           int64_t v_token, int64_t v_head, T *keys, T *values) {
#pragma omp parallel for schedule(static) if (step.num_tokens > 64)
    for (int64_t t = 0; t < step.num_tokens; t++)
        write_token(step, t, 0, step.num_kv_heads, key + t * k_token, k_head, value + t * v_token,
                    v_head, keys, values);
}

}  // namespace

#define DOOR(NAME, T)                                                                             \
    extern "C" void attend_##NAME(const Step *step, const T *query, int64_t token_stride,          \
                                  int64_t head_stride, const T *keys, const T *values, float scale, \
                                  int64_t window, float softcap, const float *sinks, T *out) {     \
        attend<T>({*step, query, token_stride, head_stride, keys, values, scale, window, softcap,  \
                   sinks, out, step->num_heads * DV});                                             \
    }                                                                                              \
    extern "C" void write_##NAME(const Step *step, const T *key, int64_t k_token, int64_t k_head,  \
                                 const T *value, int64_t v_token, int64_t v_head, T *keys,         \
                                 T *values) {                                                      \
        write<T>(*step, key, k_token, k_head, value, v_token, v_head, keys, values);               \
    }

DOOR(float32, float)
DOOR(bfloat16, uint16_t)
