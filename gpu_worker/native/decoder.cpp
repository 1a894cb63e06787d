// A whole forward of a decoder of the Llama kind, for one step, in one parallel region.
//
//     x = embedding                                                   float, the residual stream
//     each layer:  q, k, v = Wqkv norm(x);  rotate;  write k, v;  x += Wo attention(q)
//                  x += Wdown (silu(Wgate norm(x)) * Wup norm(x))     gate and up by turns, 16 each
//     logits = Whead norm(x) of the rows that sample
//
// Compiled for MODEL_TYPE, in which the model and its cache are kept (float, or uint16_t for
// bfloat16), and WEIGHT_TYPE, in which weights are packed (the same, or int8_t).

#include <optional>

#include "attention.h"
#include "matmul.h"
#include "team.h"

namespace {

struct LayerWeights {
    const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two may be missing
    Linear qkv, out, gate_up, down;
    void *keys, *values;
    int64_t window;  // 0: none
};

struct Decoder {
    int64_t hidden, intermediate, num_heads, num_kv_heads, vocab;
    const float *cos, *sin;  // [positions][DK / 2]
    const LayerWeights *layers;
    const void *embedding;
    const float *norm;
    Linear head;
    float eps, scale;
};

struct Work {
    const int64_t *token_ids, *positions;  // of each token; no ids: x is given
    const int64_t *logits_indices;
    int64_t num_logits;
    float *logits;               // [num_logits][vocab]
    float *x;                    // [tokens][hidden padded to COLS]
    char *arena;                 // zeros at first
    int64_t max_tokens;          // that the arena is for
    int64_t first_layer, last_layer;
    double *seconds;  // [KINDS] of phases, counted up
    int64_t has_tiles, is_invariant, num_threads;
};

constexpr bool SMALL = true;  // items

enum Kind { PRODUCTS, ATTENTION, ROTARY, NORMS, KINDS };

inline int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

template <class T, class W>
class Forward {
    using Act = typename Beside<W>::Act;
    using Number = Factor<T>;  // of what is between products
    using Attention = ::Attention<T, Number>;
    static constexpr bool IS_SCALED = std::is_same_v<W, int8_t>;

    struct Rows {  // of a matrix with a stride
        Number *data;
        int64_t stride;
        Number *operator[](int64_t row) const { return data + row * stride; }
    };

  public:
    Forward(const Decoder &decoder, const Step &step, const Work &work)
        : d(decoder), step(step), work(work),
          machine{work.has_tiles != 0, work.is_invariant != 0},
          num_tokens(step.num_tokens), x_stride(padded(d.hidden, COLS)),
          act_stride(padded(std::max({d.hidden, d.intermediate, d.num_heads * DV}), SHARE)),
          num_shares(act_stride / SHARE) {
        char *at = work.arena;
        const int64_t rows = padded(work.max_tokens, BLOCK_ROWS);
        const auto take = [&](int64_t bytes) {
            char *taken = at;
            at += padded(bytes, 64);
            return taken;
        };
        acts = (Act *)take(rows * act_stride * sizeof(Act));
        scales = (float *)take(rows * num_shares * sizeof(float));
        qkv.stride = padded((d.num_heads + 2 * d.num_kv_heads) * DK, COLS);
        attended.stride = padded(d.num_heads * DV, 64);
        activated.stride = padded(d.intermediate, 64);
        for (Rows *r : {&qkv, &attended, &activated})
            r->data = (Number *)take(rows * r->stride * sizeof(Number));
        size = at - work.arena;
    }

    int64_t arena_size() const { return size; }

    void run() {
        const Items items(step, work.num_threads);
        for (int64_t s = 0; s < step.num_seqs; s++)
            if (!items.is_apart(s))
                for (int64_t t = step.start(s); t < step.start(s + 1); t++) common.push_back(t);
        Team team(work.num_threads);
#pragma omp parallel num_threads(work.num_threads)
        {
            const TileConfig tiles(machine.has_tiles);
            Thread my{{team, work.seconds}, {}, {}};
            if (work.token_ids)
                my.part.each(NORMS, num_tokens, [&](int64_t t) { embed(t); }, SMALL);
            look_ahead(my, work.first_layer, items);
            for (int64_t l = work.first_layer; l < work.last_layer; l++) run_layer(my, l, items);
            if (work.num_logits > 0) run_head(my);
        }
    }

  private:
    struct Thread {
        Member part;
        Lookahead ahead;
        std::optional<CachePieces<T, Number>> upcoming;  // of the next layer that attends
    };

    void run_layer(Thread &my, int64_t l, const Items &items) {
        const LayerWeights &layer = d.layers[l];
        const Linear *after = l + 1 < work.last_layer ? &d.layers[l + 1].qkv
                              : work.num_logits > 0   ? &d.head
                                                      : nullptr;
        my.part.each(NORMS, num_tokens, [&](int64_t t) { normalize(t, x(t), layer.input_norm); },
                     SMALL);
        multiply(my, acts, act_stride, num_tokens, layer.qkv, &layer.out,
                 [&](int64_t t, int64_t panel, const float *y) {
                     Number *to = qkv[t] + panel * COLS;
                     for (int i = 0; i < COLS; i += VL) store(to + i, load(y + i));
                 });
        if (!common.empty())
            my.part.each(ROTARY, common.size(),
                         [&](int64_t i) { rotate_and_write(common[i], 0, d.num_kv_heads, layer); },
                         SMALL);
        const Attention attention = attention_of(l);
        my.part.each(ATTENTION, items.size(), [&](int64_t i) {
            const Items::Item item = items[i];
            if (items.is_apart(item.seq))
                for (int64_t t = step.start(item.seq); t < step.start(item.seq + 1); t++)
                    rotate_and_write(t, item.head, item.head + item.num_heads, layer);
            attention.attend(items, i);
        });
        look_ahead(my, l + 1, items);
        add_product(my, attended, d.num_heads * DV, layer.out, &layer.gate_up);
        my.part.each(NORMS, num_tokens, [&](int64_t t) { normalize(t, x(t), layer.post_norm); },
                     SMALL);
        multiply(my, acts, act_stride, num_tokens, layer.gate_up, &layer.down,
                 [&](int64_t t, int64_t panel, const float *y) {
                     constexpr int HALF = COLS / 2;
                     for (int i = 0; i < HALF; i += VL) {
                         const vec gate = load(y + i);
                         store(activated[t] + panel * HALF + i,
                               gate * sigmoidv(gate) * load(y + HALF + i));
                     }
                 });
        add_product(my, activated, d.intermediate, layer.down, after);
    }

    Attention attention_of(int64_t l) const {
        const LayerWeights &layer = d.layers[l];
        return {step, qkv.data, qkv.stride, DK, (const T *)layer.keys, (const T *)layer.values,
                d.scale, layer.window, 0.f, nullptr, attended.data, attended.stride};
    }

    // Products from here on ask for what this layer's attention will read.
    void look_ahead(Thread &my, int64_t l, const Items &items) const {
        my.upcoming.reset();
        if (l >= work.last_layer) return;
        const Range mine = my.part.mine(items.size());
        my.upcoming.emplace(attention_of(l), items, mine.begin, mine.end);
    }

    void run_head(Thread &my) {
        my.part.each(NORMS, work.num_logits,
                     [&](int64_t i) { normalize(i, x(work.logits_indices[i]), d.norm); }, SMALL);
        multiply(my, acts, act_stride, work.num_logits, d.head, nullptr,
                 [&](int64_t i, int64_t panel, const float *y) {
                     const int64_t first = panel * COLS;
                     memcpy(work.logits + i * d.vocab + first, y,
                            std::min<int64_t>(COLS, d.vocab - first) * sizeof(float));
                 });
    }

    float *x(int64_t t) const { return work.x + t * x_stride; }

    void embed(int64_t t) const {
        const T *row = (const T *)d.embedding + work.token_ids[t] * d.hidden;
        for (int64_t i = 0; i < d.hidden; i += VL) store(x(t) + i, load(row + i));
    }

    // RMSNorm of a row of the residual stream; `to` is the row of the activations.
    void normalize(int64_t to, const float *row, const float *weight) const {
        vec squares{};
        for (int64_t i = 0; i < d.hidden; i += VL) squares += load(row + i) * load(row + i);
        const float factor = 1.f / std::sqrt(sum_of(squares) / float(d.hidden) + d.eps);
        const auto numbers = [&](int64_t i) { return load(row + i) * factor * load(weight + i); };
        Act *out = acts + to * act_stride;
        if constexpr (IS_SCALED)
            quantize(d.hidden, numbers, out, scales + to * num_shares);
        else
            for (int64_t i = 0; i < d.hidden; i += VL) store(out + i, numbers(i));
    }

    // Of a token, what belongs to the kv heads [begin, end).
    void rotate_and_write(int64_t t, int64_t begin, int64_t end, const LayerWeights &layer) const {
        const int64_t per_kv = d.num_heads / d.num_kv_heads;
        Number *queries = qkv[t];
        Number *key = queries + d.num_heads * DK, *value = key + d.num_kv_heads * DK;
        for (int64_t h = begin * per_kv; h < end * per_kv; h++)
            rotate(queries + h * DK, work.positions[t], layer.q_norm);
        for (int64_t h = begin; h < end; h++) rotate(key + h * DK, work.positions[t], layer.k_norm);
        write_token(step, t, begin, end, key, DK, value, DV, (T *)layer.keys, (T *)layer.values);
    }

    void rotate(Number *head, int64_t position, const float *norm) const {
        constexpr int HALF = DK / 2;
        alignas(64) float numbers[DK], turned[DK];
        vec squares{};
        for (int i = 0; i < DK; i += VL) {
            const vec x = load(head + i);
            squares += x * x;
            store(numbers + i, x);
        }
        if (norm) {
            const float factor = 1.f / std::sqrt(sum_of(squares) / DK + d.eps);
            for (int i = 0; i < DK; i++) numbers[i] *= factor * norm[i];
        }
        const float *cos = d.cos + position * HALF, *sin = d.sin + position * HALF;
        for (int i = 0; i < HALF; i++) {
            turned[i] = numbers[i] * cos[i] - numbers[i + HALF] * sin[i];
            turned[i + HALF] = numbers[i + HALF] * cos[i] + numbers[i] * sin[i];
        }
        for (int i = 0; i < DK; i += VL) store(head + i, load(turned + i));
    }

    // x += W rows, of which n numbers count.
    void add_product(Thread &my, const Rows &rows, int64_t n, const Linear &linear,
                     const Linear *after) {
        const auto add = [&](int64_t t, int64_t panel, const float *y) {
            float *to = x(t) + panel * COLS;
            for (int i = 0; i < COLS; i += VL) store(to + i, load(to + i) + load(y + i));
        };
        if constexpr (IS_SCALED) {
            my.part.each(NORMS, num_tokens, [&](int64_t t) {
                quantize(n, [&](int64_t i) { return load(rows[t] + i); }, acts + t * act_stride,
                         scales + t * num_shares);
            }, SMALL);
            multiply(my, acts, act_stride, num_tokens, linear, after, add);
        } else {
            multiply(my, rows.data, rows.stride, num_tokens, linear, after, add);
        }
    }

    // The product of rows with a packed matrix; each row's COLS numbers of a panel go to `then`.
    // `after` is the matrix that these rows, or some of them, go through next.
    template <class Then>
    void multiply(Thread &my, const Act *a, int64_t stride, int64_t num_rows, const Linear &linear,
                  const Linear *after, Then then) {
        constexpr int64_t AT_ONCE = 256;  // rows that stay near while all panels pass
        const int64_t num_panels = linear.num_outputs / COLS;
        const int64_t num_items = (num_rows + AT_ONCE - 1) / AT_ONCE * num_panels;
        const Range mine = my.part.mine(num_items);
        my.part.each(PRODUCTS, num_items, [&](int64_t item) {
            const int64_t panel = item % num_panels, first = item / num_panels * AT_ONCE;
            const int64_t end = std::min(num_rows, first + AT_ONCE);
            const W *weights = (const W *)panel_of(linear, panel).begin;
            Panel next;
            if (mine.begin <= item && item + 1 < mine.end)
                next = panel_of(linear, (panel + 1) % num_panels);
            else if (item + 1 == mine.end && after)
                next = panel_of(*after, my.part.mine(after->num_outputs / COLS).begin);
            my.ahead.begin(panel_of(linear, panel), next, machine.num_passes<W>(end - first),
                           [&] { return my.upcoming ? my.upcoming->next() : nullptr; });
            alignas(64) float numbers[BLOCK_ROWS * COLS];
            for (int64_t row = first; row < end; row += BLOCK_ROWS) {
                const int rows = int(std::min<int64_t>(BLOCK_ROWS, end - row));
                if constexpr (IS_SCALED)
                    multiply_shares(machine, linear, panel,
                                    Quantized{a, stride, scales, num_shares}.after(row), rows,
                                    weights, my.ahead, numbers);
                else
                    machine.block<W>(a + row * stride, stride, rows, weights, linear.num_inputs,
                                     my.ahead, numbers);
                float *y = numbers;
                for (int r = 0; r < rows; r++, y += COLS) {
                    if (linear.bias)
                        for (int i = 0; i < COLS; i++) y[i] += linear.bias[panel * COLS + i];
                    then(row + r, panel, y);
                }
            }
        });
    }

    static Panel panel_of(const Linear &linear, int64_t panel) {
        const int64_t size = COLS * linear.num_inputs * sizeof(W);
        return {(const char *)linear.weights + panel * size, size};
    }

    const Decoder &d;
    const Step &step;
    const Work &work;
    const Machine machine;
    const int64_t num_tokens, x_stride, act_stride, num_shares;
    Act *acts;
    float *scales;  // [rows][num_shares] of acts
    Rows qkv, attended, activated;
    std::vector<int64_t> common;  // tokens whose keys any item may read
    int64_t size;
};

}  // namespace

extern "C" int64_t has_tiles() { return ask_for_tiles(); }

extern "C" int64_t most_threads() { return omp_get_max_threads(); }

extern "C" void forward(const Decoder *decoder, const Step *step, const Work *work) {
    Forward<MODEL_TYPE, WEIGHT_TYPE>(*decoder, *step, *work).run();
}

extern "C" int64_t arena_size(const Decoder *decoder, const Step *step, const Work *work) {
    return Forward<MODEL_TYPE, WEIGHT_TYPE>(*decoder, *step, *work).arena_size();
}
