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
// group (GQA) packed together, so that each key and value that is loaded serves R rows. Where a tile
// is all there is of a sequence, several kv heads go together, as their blocks lie. A row sees
// the keys [first, last). Softmax is online, in powers of two.
//
// T is what the cache is kept in, A what queries come in and what is attended to leaves in.

#pragma once

#include <vector>

#include "lookahead.h"
#include "numbers.h"

namespace {

constexpr int GROUP = 16;          // tokens of a group
constexpr int LANES = GROUP / VL;  // registers that hold one number for each token of a group
constexpr int R = VL == 16 ? 12 : 8;  // rows of a full tile
constexpr int HEADS = 8;           // key/value heads that are gone through together, at most
constexpr float HEADROOM = 8.f;    // above the largest score so far, in powers of two

static_assert(GROUP % VL == 0 && DV % VL == 0, "sizes are multiples of the vector length");

// ------------------------------------------------------------------ one tile

struct Layer {
    float scale;    // of the scores
    float softcap;  // 0: none
};

template <class A>
struct Row {
    const A *query;  // DK numbers
    A *out;          // DV numbers
    int64_t first, last;
    float sink;  // NONE: the head has none
};

template <class T>
struct Group {  // of one head
    const T *keys, *values;
};

// What rows of one sequence and some heads that lie side by side have to read.
template <class T>
struct Reading {
    const T *keys, *values;  // of the layer
    const int64_t *blocks;   // of the sequence
    int64_t num_kv_heads, groups_per_block;
    int64_t head, num_heads;
    int64_t first, end;  // groups

    Group<T> at(int64_t group, int64_t h) const {
        const int64_t block = blocks[group / groups_per_block] * num_kv_heads + head + h;
        const int64_t token = (block * groups_per_block + group % groups_per_block) * GROUP;
        return {keys + token * DK, values + token * DV};
    }
};

// Have a line come into the second cache: more of them can be on their way than into the first.
inline void ask_for(const void *line) { __builtin_prefetch(line, 0, 2); }

// N rows of one head, while its keys and values pass by a group at a time.
template <class T, class A, int N>
class Pass {
    static constexpr int W = DV / VL, P = PACK<T>;
    static constexpr int FEW = VL == 16 ? 4 : 3;  // rows of which four sums each stay in registers
    static constexpr int SLICES = N <= FEW && W % 4 == 0 ? 4 : N <= 2 * FEW && W % 2 == 0 ? 2 : 1;
    static_assert(DK % (2 * P) == 0, "packs of a key are added up by turns");

  public:
    void start(const Row<A> *of_head, const Layer &of_layer) {
        rows = of_head, layer = &of_layer;
        begin = full_begin = rows[0].first, end = full_end = rows[0].last;
        for (int r = 0; r < N; r++) {
            top[r] = rows[r].sink == NONE ? NONE : rows[r].sink * LOG2E;
            total[r] = vec{};
            if (rows[r].sink != NONE) total[r][0] = 1.f;
            for (int d = 0; d < DK; d++) q[d / P][r][d % P] = as<Factor<T>>(rows[r].query[d]);
            for (int w = 0; w < W; w++) acc[r][w] = vec{};
            begin = std::min(begin, rows[r].first);
            end = std::max(end, rows[r].last);
            full_begin = std::max(full_begin, rows[r].first);
            full_end = std::min(full_end, rows[r].last);
        }
    }

    // Take the tokens from t0 on. Groups are all over the memory: a later one is asked for, a little
    // at a time, so that it comes while this one is computed.
    void take(int64_t t0, Group<T> here, Group<T> later) {
        vec s[N][LANES];
        score(here.keys, later.keys, s);
        if (t0 < full_begin || t0 + GROUP > full_end) hide(t0, s);
        alignas(64) Factor<T> p[N][GROUP];
        for (int r = 0; r < N; r++) weigh(r, s[r], p[r]);
        add(t0, here.values, later.values, p);
    }

    void finish() const {
        for (int r = 0; r < N; r++) {
            const float sum = sum_of(total[r]), share = sum == 0 ? 0.f : 1.f / sum;
            for (int w = 0; w < W; w++) store(rows[r].out + w * VL, acc[r][w] * share);
        }
    }

  private:
    void score(const T *k, const T *later, vec (&s)[N][LANES]) const {
        // With a soft cap the scores are capped before they become exponents of two.
        const float cap = layer->softcap, factor = layer->scale * (cap > 0 ? 1.f / cap : LOG2E);
        UNROLLED for (int l = 0; l < LANES; l++) {
            vec even[N], odd[N];  // two sums for each: adding up has a latency
            for (int r = 0; r < N; r++) even[r] = odd[r] = vec{};
            for (int d = 0; d < DK; d += 2 * P) {
                const int at = d * GROUP + l * VL * P, next = at + P * GROUP;
                if (l == 0) {  // a line has all lanes
                    ask_for(later + at);
                    ask_for(later + next);
                }
                const auto k0 = opened(load_packs(k + at)), k1 = opened(load_packs(k + next));
                for (int r = 0; r < N; r++) even[r] = dot(even[r], q[d / P][r], k0);
                for (int r = 0; r < N; r++) odd[r] = dot(odd[r], q[d / P + 1][r], k1);
            }
            for (int r = 0; r < N; r++) {
                s[r][l] = (even[r] + odd[r]) * factor;
                if (cap > 0) s[r][l] = tanhv(s[r][l]) * (cap * LOG2E);
            }
        }
    }

    void hide(int64_t t0, vec (&s)[N][LANES]) const {  // from each row what it does not see
        vec lane;
        for (int i = 0; i < VL; i++) lane[i] = float(i);
        for (int r = 0; r < N; r++)
            for (int l = 0; l < LANES; l++) {
                const vec t = lane + float(l * VL);
                const ivec seen =
                    (t >= all(float(rows[r].first - t0))) & (t < all(float(rows[r].last - t0)));
                s[r][l] = pick(seen, s[r][l], all(NONE));
            }
    }

    void weigh(int r, const vec (&s)[LANES], Factor<T> *p) {
        ivec is_above{};
        for (int l = 0; l < LANES; l++) is_above |= s[l] > all(top[r]);
        if (any(is_above)) raise(r, s);
        for (int l = 0; l < LANES; l++) {
            store(p + l * VL, pick(s[l] == all(NONE), vec{}, exp2v(s[l] - top[r])));
            total[r] += load(p + l * VL);  // as rounded: the errors of both sums cancel out
        }
    }

    // Scores may come up to `top`. It is raised further than it must be, so that this is rare.
    void raise(int r, const vec (&s)[LANES]) {
        float peak = max_of(s[0]);
        for (int l = 1; l < LANES; l++) peak = std::max(peak, max_of(s[l]));
        const float raised = peak + HEADROOM, shrink = exp2v(all(top[r] - raised))[0];
        total[r] *= shrink;
        for (int w = 0; w < W; w++) acc[r][w] *= shrink;
        top[r] = raised;
    }

    void add(int64_t t0, const T *v, const T *later, const Factor<T> (&p)[N][GROUP]) {
        // Beyond the end the cache may hold anything, NaN among it: it is not read.
        const int from = int(std::max<int64_t>(begin - t0, 0));
        const int to = int(std::min<int64_t>(end - t0, GROUP));
        for (int w = 0; w < W; w += SLICES) {  // these accumulators stay in registers
            vec a[N][SLICES];
            for (int r = 0; r < N; r++)
                for (int i = 0; i < SLICES; i++) a[r][i] = acc[r][w + i];
            for (int t = from - from % P; t < to; t += P)
                for (int i = 0; i < SLICES; i++) {
                    const int at = t * DV + (w + i) * VL * P;
                    if ((w + i) % LANES == 0) ask_for(later + at);
                    auto packs = load_packs(v + at);
                    if constexpr (P == 2) {
                        if (t < from) packs &= 0xffff0000u;
                        if (t + 1 >= to) packs &= 0x0000ffffu;
                    }
                    const auto numbers = opened(packs);
                    for (int r = 0; r < N; r++) a[r][i] = dot(a[r][i], p[r] + t, numbers);
                }
            for (int r = 0; r < N; r++)
                for (int i = 0; i < SLICES; i++) acc[r][w + i] = a[r][i];
        }
    }

    const Row<A> *rows;
    const Layer *layer;
    int64_t begin, end;            // keys that some row sees
    int64_t full_begin, full_end;  // and that all of them see
    alignas(64) Factor<T> q[DK / P][N][P];
    vec acc[N][W];  // sums of values
    vec total[N];   // and of their weights, over all lanes
    float top[N];
};

// N rows of each head. The heads' keys lie side by side and are gone through together, since memory
// is fastest in order. `upcoming` is likely to be read after this.
template <class T, int N, int MOST, class A>
void attend_rows(const Row<A> (*rows)[R], const Reading<T> &reading, const Reading<T> &upcoming,
                 const Layer &layer) {
    Pass<T, A, N> passes[MOST];
    const int num_heads = MOST == 1 ? 1 : int(reading.num_heads);
    for (int h = 0; h < num_heads; h++) passes[h].start(rows[h], layer);
    const auto later_than = [&](int64_t g, int h) {
        h += MOST == 1 ? 2 : 1;
        g += h / num_heads, h %= num_heads;
        if (g < reading.end) return reading.at(g, h);
        return upcoming.at(std::min(upcoming.first + g - reading.end, upcoming.end - 1),
                           std::min<int64_t>(h, upcoming.num_heads - 1));
    };
    for (int64_t g = reading.first; g < reading.end; g++)
        for (int h = 0; h < num_heads; h++)
            passes[h].take(g * GROUP, reading.at(g, h), later_than(g, h));
    for (int h = 0; h < num_heads; h++) passes[h].finish();
}

template <class T, class A>
void attend_tile(const Row<A> (*rows)[R], int num_rows, const Reading<T> &reading,
                 const Reading<T> &upcoming, const Layer &layer) {
    with_constant<R>(num_rows, [&](auto n) {
        if (reading.num_heads == 1) attend_rows<T, n(), 1>(rows, reading, upcoming, layer);
        else attend_rows<T, n(), HEADS>(rows, reading, upcoming, layer);
    });
}

// ------------------------------------------------------------------ one layer of a step

struct Step {  // as attention/cpu.py fills it; all addresses are of int64 arrays
    const int64_t *query_start_loc, *seq_lens, *slots, *block_tables;
    int64_t num_seqs, num_tokens, table_stride, num_heads, num_kv_heads, block_size;
    int64_t num_decodes;  // the first sequences, whose new tokens no other one sees

    int64_t start(int64_t s) const { return query_start_loc[s]; }  // of its tokens
    int64_t query_len(int64_t s) const { return start(s + 1) - start(s); }
    int64_t num_rows(int64_t s) const { return query_len(s) * (num_heads / num_kv_heads); }
};

// How a step is cut into items: one tile each, of one head or of several.
class Items {
  public:
    struct Item {
        int64_t seq, tile, head, num_heads;
    };

    Items(const Step &step, int64_t num_threads)
        : step(step), heads(step.num_seqs), first(step.num_seqs + 1) {
        int64_t all_keys = 0;  // that are gone through
        for (int64_t s = 0; s < step.num_seqs; s++)
            all_keys += num_tiles(s) * step.num_kv_heads * step.seq_lens[s];
        // Enough items for each thread to be busy until the end.
        const int64_t most_keys = all_keys / (4 * num_threads);
        for (int64_t s = 0; s < step.num_seqs; s++) {
            const int64_t most = std::min<int64_t>(HEADS, step.num_kv_heads);
            const int64_t num_keys = std::max<int64_t>(step.seq_lens[s], 1);
            heads[s] = std::clamp<int64_t>(most_keys / num_keys, 1, most);
            if (num_tiles(s) > 1) heads[s] = 1;  // its keys are near after the first tile
            first[s + 1] = first[s] + num_tiles(s) * num_parts(s);
        }
    }

    int64_t size() const { return first.back(); }

    Item operator[](int64_t i) const {
        // The last tiles of a prompt see the most keys: they go first.
        const int64_t at = size() - 1 - i;
        const int64_t s = std::upper_bound(first.begin(), first.end(), at) - first.begin() - 1;
        const int64_t tile = (at - first[s]) / num_parts(s), part = (at - first[s]) % num_parts(s);
        const int64_t head = part * heads[s];
        return {s, tile, head, std::min(heads[s], step.num_kv_heads - head)};
    }

    // Whether what a sequence writes is read only by the items that have its heads.
    bool is_apart(int64_t s) const { return s < step.num_decodes && num_tiles(s) == 1; }

    // What the thread that does an item is likely to do next.
    Item after(int64_t i) const { return (*this)[std::min(i + 1, size() - 1)]; }

  private:
    int64_t num_tiles(int64_t s) const { return (step.num_rows(s) + R - 1) / R; }
    int64_t num_parts(int64_t s) const { return (step.num_kv_heads + heads[s] - 1) / heads[s]; }

    const Step &step;
    std::vector<int64_t> heads;  // of a sequence that are gone through together
    std::vector<int64_t> first;  // item of each sequence, and the end
};

template <class T, class A>
struct Attention {  // one layer's
    const Step &step;
    const A *query;
    int64_t token_stride, head_stride;
    const T *keys, *values;
    float scale;
    int64_t window;
    float softcap;
    const float *sinks;
    A *out;
    int64_t out_stride;  // from token to token

    void attend(const Items &items, int64_t i) const {
        const Items::Item item = items[i];
        const Layer layer{scale, softcap};
        const int64_t per_kv = step.num_heads / step.num_kv_heads;
        const int64_t start = step.start(item.seq), row = item.tile * R;
        const int num_rows = int(std::min<int64_t>(R, step.num_rows(item.seq) - row));
        Row<A> rows[HEADS][R];
        for (int64_t h = 0; h < item.num_heads; h++)
            for (int r = 0; r < num_rows; r++) {
                const int64_t token = (row + r) / per_kv;
                const int64_t head = (item.head + h) * per_kv + (row + r) % per_kv;
                Row<A> &made = rows[h][r];
                made.query = query + (start + token) * token_stride + head * head_stride;
                made.out = out + (start + token) * out_stride + head * DV;
                made.last = end_of(item.seq, token);
                made.first = first_of(made.last);
                made.sink = sinks ? sinks[head] : NONE;
            }
        attend_tile<T>(rows, num_rows, reading(item), reading(items.after(i)), layer);
    }

    Reading<T> reading(const Items::Item &item) const {
        const int64_t per_kv = step.num_heads / step.num_kv_heads, row = item.tile * R;
        const int64_t last = std::min(row + R, step.num_rows(item.seq)) - 1;
        const int64_t *blocks = step.block_tables + item.seq * step.table_stride;
        const int64_t first = first_of(end_of(item.seq, row / per_kv)) / GROUP;
        const int64_t end = (end_of(item.seq, last / per_kv) + GROUP - 1) / GROUP;
        return {keys, values, blocks, step.num_kv_heads, step.block_size / GROUP,
                item.head, item.num_heads, first, end};
    }

  private:
    // Keys [first, end) that a token sees, counted from the step's first of its sequence.
    int64_t end_of(int64_t s, int64_t token) const {
        return step.seq_lens[s] - step.query_len(s) + token + 1;
    }
    int64_t first_of(int64_t end) const {
        return window > 0 ? std::max<int64_t>(0, end - window) : 0;
    }
};

// Where the items [begin, end) of a layer read, piece by piece: those that are apart, and no more
// than may stay near until it is read.
template <class T, class A>
class CachePieces {
  public:
    CachePieces(const Attention<T, A> &attention, const Items &items, int64_t begin, int64_t end)
        : attention(attention), items(&items), item(begin - 1), end(end) {}

    const char *next() {  // none: that was all
        if (num_left-- <= 0) return nullptr;
        while (at >= stop)
            if (!turn()) return nullptr;
        const char *piece = at;
        at += PIECE;
        return piece;
    }

  private:
    static constexpr int64_t NEAR = 4 << 20;  // bytes: a core's part of the last cache, or so

    bool turn() {  // to what lies together next
        if (values) {
            at = values, stop = at + GROUP * DV * sizeof(T);
            values = nullptr;
            return true;
        }
        if (++head >= reading.num_heads) head = 0, group++;
        if (group >= reading.end) {
            do {
                if (++item >= end) return false;
            } while (!items->is_apart((*items)[item].seq));
            reading = attention.reading((*items)[item]);
            head = 0, group = reading.first;
        }
        const Group<T> here = reading.at(group, head);
        at = (const char *)here.keys, stop = at + GROUP * DK * sizeof(T);
        values = (const char *)here.values;
        return true;
    }

    Attention<T, A> attention;
    const Items *items;
    int64_t item, end, group = 0, head = 0;
    int64_t num_left = NEAR / PIECE;
    Reading<T> reading{};
    const char *at = nullptr, *stop = nullptr, *values = nullptr;
};

// Keys and values of a token and the kv heads [head, end); those of h are at `key + h * k_head`.
template <class T, class A>
void write_token(const Step &step, int64_t t, int64_t head, int64_t end, const A *key,
                 int64_t k_head, const A *value, int64_t v_head, T *keys, T *values) {
    constexpr int P = PACK<T>;
    if (step.slots[t] < 0) return;
    const int64_t groups_per_block = step.block_size / GROUP;
    const int64_t block = step.slots[t] / step.block_size, place = step.slots[t] % step.block_size;
    for (int64_t h = head; h < end; h++) {
        const int64_t at = block * step.num_kv_heads + h;
        T *k = keys + (at * groups_per_block + place / GROUP) * DK * GROUP + place % GROUP * P;
        T *v = values + (at * step.block_size + place / P * P) * DV + place % P;
        for (int d = 0; d < DK; d++) k[d / P * P * GROUP + d % P] = as<T>(key[h * k_head + d]);
        for (int d = 0; d < DV; d++) v[d * P] = as<T>(value[h * v_head + d]);
    }
}

}  // namespace
