// Ragged paged attention on the CPU, and the cache write beside it.
//
// Compiled for one head size at a time: DK and DV are the key and value sizes.
//
// The cache of a layer, for each block and key/value head h:
//     K  [block][h][group][DK / P][16][P]   16 tokens side by side: scores need no sum across a register
//     V  [block][h][token / P][DV][P]
// where a group is 16 tokens; a block holds block_size / 16 groups; and P is PACK: numbers that are
// multiplied and added up by one instruction lie side by side.
//
// A *tile* is up to R query rows of one sequence and one kv head: query position and head of the
// group (GQA) packed together, so that each key and value that is loaded serves R rows. A row sees
// the keys [first, last). Softmax is online, in powers of two.

#pragma once

#include <vector>

#include "numbers.h"

namespace {

constexpr int GROUP = 16;          // tokens of a group
constexpr int LANES = GROUP / VL;  // registers that hold one number for each token of a group
constexpr int R = 12;              // rows of a full tile
constexpr int AHEAD_GROUPS = 2;    // groups that are asked for before they are needed

static_assert(GROUP % VL == 0 && DV % VL == 0, "sizes are multiples of the vector length");

// ------------------------------------------------------------------ one tile

// Have a line come into the second cache: more of them can be on their way than into the first.
inline void ask_for(const char *line) { __builtin_prefetch(line, 0, 2); }

struct Layer {
    int64_t num_kv_heads, block_size;
    float scale;    // of the scores
    float softcap;  // 0: none
};

template <class T>
struct Row {
    const T *query;  // DK numbers
    T *out;          // DV numbers
    int64_t first, last;
    float sink;  // NONE: the head has none
};

template <class T, int N>
void attend_rows(const Row<T> *rows, const T *keys, const T *values, const int64_t *blocks,
                 int64_t head, const Layer &layer) {
    constexpr int W = DV / VL;
    constexpr int SLICES = N <= 4 && W % 4 == 0 ? 4 : N <= 8 && W % 2 == 0 ? 2 : 1;
    constexpr int P = PACK<T>;
    static_assert(DK % (2 * P) == 0, "packs of a key are added up by turns");
    alignas(64) T q[DK / P][N][P];
    vec acc[N][W];
    float top[N];   // running maximum of each row
    vec total[N];   // and sum of powers of two, over all lanes
    int64_t begin = rows[0].first, end = rows[0].last, full_begin = begin, full_end = end;
    // With a soft cap the scores are capped before they become exponents of two.
    const float factor = layer.softcap > 0 ? layer.scale / layer.softcap : layer.scale * LOG2E;
    for (int r = 0; r < N; r++) {
        top[r] = rows[r].sink == NONE ? NONE : rows[r].sink * LOG2E;
        total[r] = vec{};
        if (rows[r].sink != NONE) total[r][0] = 1.f;
        for (int d = 0; d < DK; d++) q[d / P][r][d % P] = rows[r].query[d];
        for (int w = 0; w < W; w++) acc[r][w] = vec{};
        begin = std::min(begin, rows[r].first);
        end = std::max(end, rows[r].last);
        full_begin = std::max(full_begin, rows[r].first);
        full_end = std::min(full_end, rows[r].last);
    }
    vec lane;
    for (int i = 0; i < VL; i++) lane[i] = float(i);

    const int64_t groups_per_block = layer.block_size / GROUP;
    const auto keys_of = [&](int64_t g) {
        const int64_t at = blocks[g / groups_per_block] * layer.num_kv_heads + head;
        return keys + (at * groups_per_block + g % groups_per_block) * DK * GROUP;
    };
    const auto values_of = [&](int64_t g) {
        const int64_t at = blocks[g / groups_per_block] * layer.num_kv_heads + head;
        return values + (at * layer.block_size + g % groups_per_block * GROUP) * DV;
    };
    for (int64_t g = begin / GROUP; g * GROUP < end; g++) {
        const int64_t t0 = g * GROUP;
        const T *k = keys_of(g), *v = values_of(g);
        // Groups are all over the memory. One further on is asked for, a little at a time, so that
        // it comes while this one is computed.
        const int64_t next = (g + AHEAD_GROUPS) * GROUP < end ? g + AHEAD_GROUPS : g;
        const char *next_k = (const char *)keys_of(next), *next_v = (const char *)values_of(next);

        vec s[N][LANES], odd[N][LANES];  // two sums for each: adding up has a latency
        for (int r = 0; r < N; r++)
            for (int l = 0; l < LANES; l++) s[r][l] = odd[r][l] = vec{};
        for (int d = 0; d < DK; d += 2 * P)
            for (int l = 0; l < LANES; l++) {
                const T *at = k + d * GROUP + l * VL * P;
                ask_for(next_k + (d * GROUP + l * VL * P) * sizeof(T));
                ask_for(next_k + ((d + P) * GROUP + l * VL * P) * sizeof(T));
                const auto k0 = load_packs(at), k1 = load_packs(at + P * GROUP);
                for (int r = 0; r < N; r++) s[r][l] = dot(s[r][l], q[d / P][r], k0);
                for (int r = 0; r < N; r++) odd[r][l] = dot(odd[r][l], q[d / P + 1][r], k1);
            }
        for (int r = 0; r < N; r++)
            for (int l = 0; l < LANES; l++) s[r][l] = (s[r][l] + odd[r][l]) * factor;

        const bool is_edge = t0 < full_begin || t0 + GROUP > full_end;
        alignas(64) T p[N][GROUP];
        for (int r = 0; r < N; r++) {
            float peak = top[r];
            for (int l = 0; l < LANES; l++) {
                if (layer.softcap > 0) s[r][l] = tanhv(s[r][l]) * (layer.softcap * LOG2E);
                if (is_edge) {
                    const vec t = lane + float(l * VL);
                    const ivec seen = (t >= all(float(rows[r].first - t0))) &
                                      (t < all(float(rows[r].last - t0)));
                    s[r][l] = pick(seen, s[r][l], all(NONE));
                }
                peak = std::max(peak, max_of(s[r][l]));
            }
            if (peak == NONE) {  // this row sees nothing yet, or nothing that is a number
                for (int t = 0; t < GROUP; t++) p[r][t] = 0;
                for (int l = 0; l < LANES; l++)
                    total[r] = pick(s[r][l] != s[r][l], s[r][l], total[r]);
                continue;
            }
            if (peak > top[r]) {
                const float shrink = exp2v(all(top[r] - peak))[0];
                total[r] *= shrink;
                for (int w = 0; w < W; w++) acc[r][w] *= shrink;
                top[r] = peak;
            }
            for (int l = 0; l < LANES; l++) {
                vec e = exp2v(s[r][l] - peak);
                if (is_edge) e = pick(s[r][l] == all(NONE), vec{}, e);
                e = pick(s[r][l] != s[r][l], s[r][l], e);  // what is no number stays none
                total[r] += e;
                store(p[r] + l * VL, e);
            }
        }

        // Beyond the end the cache may hold anything, NaN among it: it is not read.
        const int from = int(std::max<int64_t>(begin - t0, 0));
        const int to = int(std::min<int64_t>(end - t0, GROUP));
        for (int w = 0; w < W; w += SLICES) {  // these accumulators stay in registers
            vec a[N][SLICES];
            for (int r = 0; r < N; r++)
                for (int i = 0; i < SLICES; i++) a[r][i] = acc[r][w + i];
            for (int t = from - from % P; t < to; t += P)
                for (int i = 0; i < SLICES; i++) {
                    ask_for(next_v + (t * DV + (w + i) * VL * P) * sizeof(T));
                    auto packs = load_packs(v + t * DV + (w + i) * VL * P);
                    if constexpr (P == 2) {
                        if (t < from) packs &= 0xffff0000u;
                        if (t + 1 >= to) packs &= 0x0000ffffu;
                    }
                    for (int r = 0; r < N; r++) a[r][i] = dot(a[r][i], p[r] + t, packs);
                }
            for (int r = 0; r < N; r++)
                for (int i = 0; i < SLICES; i++) acc[r][w + i] = a[r][i];
        }
    }
    for (int r = 0; r < N; r++) {
        const float sum = sum_of(total[r]), share = sum == 0 ? 0.f : 1.f / sum;
        for (int w = 0; w < W; w++) store(rows[r].out + w * VL, acc[r][w] * share);
    }
}

template <class T>
void attend_tile(const Row<T> *rows, int n, const T *keys, const T *values, const int64_t *blocks,
                 int64_t head, const Layer &layer) {
    while (n > 0) {
        int step;
        switch (n) {
            case 1: step = 1; attend_rows<T, 1>(rows, keys, values, blocks, head, layer); break;
            case 2: step = 2; attend_rows<T, 2>(rows, keys, values, blocks, head, layer); break;
            case 3: step = 3; attend_rows<T, 3>(rows, keys, values, blocks, head, layer); break;
            case 4: case 5: step = 4; attend_rows<T, 4>(rows, keys, values, blocks, head, layer); break;
            case 6: case 7: step = 6; attend_rows<T, 6>(rows, keys, values, blocks, head, layer); break;
            case 8: case 9: case 10: case 11:
                step = 8; attend_rows<T, 8>(rows, keys, values, blocks, head, layer); break;
            default: step = R; attend_rows<T, R>(rows, keys, values, blocks, head, layer);
        }
        rows += step;
        n -= step;
    }
}

// ------------------------------------------------------------------ one layer of a step

struct Step {  // as attention/cpu.py fills it; all addresses are of int64 arrays
    const int64_t *query_start_loc, *seq_lens, *slots, *block_tables;
    int64_t num_seqs, num_tokens, table_stride, num_heads, num_kv_heads, block_size;
};

template <class T>
struct Attention {  // one layer's, cut into items that may be done in any order
    const Step &step;
    const T *query;
    int64_t token_stride, head_stride;
    const T *keys, *values;
    float scale;
    int64_t window;
    float softcap;
    const float *sinks;
    T *out;
    int64_t out_stride;  // from token to token

    static std::vector<int64_t> first_tiles(const Step &step) {  // of each sequence, and the end
        const int64_t per_kv = step.num_heads / step.num_kv_heads;
        std::vector<int64_t> first(step.num_seqs + 1);
        for (int64_t s = 0; s < step.num_seqs; s++) {
            const int64_t n = step.query_start_loc[s + 1] - step.query_start_loc[s];
            first[s + 1] = first[s] + (n * per_kv + R - 1) / R;
        }
        return first;
    }

    void attend(int64_t item, const std::vector<int64_t> &first_tile) const {
        const int64_t per_kv = step.num_heads / step.num_kv_heads;
        const Layer layer{step.num_kv_heads, step.block_size, scale, softcap};
        // The last tiles of a prompt see the most keys: they go first.
        const int64_t tile = first_tile[step.num_seqs] - 1 - item / step.num_kv_heads;
        const int64_t head = item % step.num_kv_heads;
        const auto found = std::upper_bound(first_tile.begin(), first_tile.end(), tile);
        const int64_t s = found - first_tile.begin() - 1;
        const int64_t start = step.query_start_loc[s], n = step.query_start_loc[s + 1] - start;
        const int64_t row = (tile - first_tile[s]) * R, num_before = step.seq_lens[s] - n;
        const int num_rows = int(std::min<int64_t>(R, n * per_kv - row));
        Row<T> rows[R];
        for (int r = 0; r < num_rows; r++) {
            const int64_t i = (row + r) / per_kv, h = head * per_kv + (row + r) % per_kv;
            const int64_t last = num_before + i + 1;
            rows[r].query = query + (start + i) * token_stride + h * head_stride;
            rows[r].out = out + (start + i) * out_stride + h * DV;
            rows[r].first = window > 0 ? std::max<int64_t>(0, last - window) : 0;
            rows[r].last = last;
            rows[r].sink = sinks ? sinks[h] : NONE;
        }
        attend_tile(rows, num_rows, keys, values, step.block_tables + s * step.table_stride, head,
                    layer);
    }
};

template <class T>
void write_token(const Step &step, int64_t t, const T *key, int64_t k_head, const T *value,
                 int64_t v_head, T *keys, T *values) {
    constexpr int P = PACK<T>;
    if (step.slots[t] < 0) return;
    const int64_t groups_per_block = step.block_size / GROUP;
    const int64_t block = step.slots[t] / step.block_size, place = step.slots[t] % step.block_size;
    for (int64_t h = 0; h < step.num_kv_heads; h++) {
        const int64_t at = block * step.num_kv_heads + h;
        T *k = keys + (at * groups_per_block + place / GROUP) * DK * GROUP + place % GROUP * P;
        T *v = values + (at * step.block_size + place / P * P) * DV + place % P;
        for (int d = 0; d < DK; d++) k[d / P * P * GROUP + d % P] = key[h * k_head + d];
        for (int d = 0; d < DV; d++) v[d * P] = value[h * v_head + d];
    }
}

}  // namespace
