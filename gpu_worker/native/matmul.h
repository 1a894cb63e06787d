// Products of activations with weights that were packed for them (packing.py).
//
// A *panel* holds the weights of COLS outputs, as the inner loop reads them:
//     float      [inputs][COLS]
//     bfloat16   [inputs / 2][COLS][2]    pairs of inputs, which one instruction multiplies and adds
//     int8       [inputs / 4][COLS][4]    fours, likewise; activations are 1 to 255 around ZERO, with
//                                         a scale for each SHARE of a row's inputs
// Inputs are padded to whole tiles with zeros, outputs to whole panels.
//
// Three forms of the inner loop: tiles (AMX), dot-product instructions (AVX-512, AVX-VNNI), and
// vectors of whatever length, beside which rows are float, or int8 in pairs. A row's numbers do not
// depend on the rows beside it, except that a row alone is added up in an order of its own, unless
// `is_invariant`.

#pragma once

#include <type_traits>

#include "lookahead.h"
#include "numbers.h"

// Tiles take what dot products take, without which activations are something else.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && \
    defined(__AVX512VNNI__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int COLS = 32;        // outputs of a panel
constexpr int NV = COLS / VL;   // vectors that hold one number for each of them
constexpr int SLICE = 2;        // of those, what a pass adds up
constexpr int SUMS_OF_ONE = 8;  // vectors in which a row alone is added up
constexpr int BLOCK_ROWS = 32;  // rows that go through a panel together
constexpr int ZERO = 128;       // what an activation of zero is beside int8
constexpr int SHARE = 64;       // inputs of a row that are quantized together
constexpr int TILES_AHEAD = 16384;  // bytes of weights that are asked for before tiles need them

// Rows of a pass, whose sums fit into registers beside what they are made of.
template <class W>
constexpr int MOST_ROWS = VL == 16 ? 12 : PACK<W> == 2 ? 5 : 6;
template <>
constexpr int MOST_ROWS<int8_t> = VL == 16 ? 8 : MULTIPLIES_FOURS ? 6 : 4;

struct Linear {  // as decoder.py fills it
    const void *weights;  // panels
    const float *scales;  // int8: of each output
    const int32_t *sums;  // int8: [shares][outputs], of each output's weights in a share
    const float *bias;    // or none
    int64_t num_outputs, num_inputs;  // padded
};

// What rows of activations look like beside weights of a type, and what they add up to.
template <class W> struct Beside;
template <> struct Beside<float> { using Act = float; using Sum = float; };
template <> struct Beside<uint16_t> { using Act = Factor<uint16_t>; using Sum = float; };
template <> struct Beside<int8_t> { using Act = Int8Act; using Sum = int32_t; };

// M rows through V vectors of a panel, of which the first are at `w`; U sums that are added up at
// the end hide the latency of adding.
template <class W, int M, int V, int U, class Asks>
void vector_rows(const typename Beside<W>::Act *a, int64_t stride, const W *w, int64_t k, Asks asks,
                 typename Beside<W>::Sum *out) {
    using Sum = typename Beside<W>::Sum;
    using Vec = std::conditional_t<std::is_same_v<Sum, float>, vec, ivec>;
    constexpr int STEP = PACK<W>;
    static_assert(STEP * COLS * sizeof(W) == 2 * LINE, "a step goes through two lines");
    Vec sum[U][M][V];
    UNROLLED for (int u = 0; u < U; u++)
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int v = 0; v < V; v++) sum[u][m][v] = Vec{};
    for (int64_t i = 0, run = 0; i < k; run++) {
        const char *line = asks.of_run(run, w + i * COLS);
        ROLLED for (int s = 0; s < STEPS; s += U)
            UNROLLED for (int u = 0; u < U; u++, i += STEP) {
                const W *at = w + i * COLS;
                asks.ask(line);
                decltype(opened(load_packs(at))) packs[V];
                UNROLLED for (int v = 0; v < V; v++)
                    packs[v] = opened(load_packs(at + v * VL * STEP));
                UNROLLED for (int m = 0; m < M; m++)
                    UNROLLED for (int v = 0; v < V; v++)
                        sum[u][m][v] = dot(sum[u][m][v], a + m * stride + i, packs[v]);
            }
    }
    UNROLLED for (int m = 0; m < M; m++)
        UNROLLED for (int v = 0; v < V; v++) {
            UNROLLED for (int u = 1; u < U; u++) sum[0][m][v] += sum[u][m][v];
            memcpy(out + m * COLS + v * VL, &sum[0][m][v], sizeof(Vec));
        }
}

// Calls `pass` with (first row, a constant that is the number of rows): as few times as it takes if
// one call takes MOST rows, and with about as many rows each time.
template <int MOST, class Pass>
void in_passes(int rows, Pass pass) {
    for (int first = 0, left = (rows + MOST - 1) / MOST; left > 0; left--) {
        const int now = (rows - first + left - 1) / left;
        with_constant<MOST>(now, [&](auto n) { pass(first, n); });
        first += now;
    }
}

template <class W>
void vector_block(const typename Beside<W>::Act *a, int64_t stride, int rows, const W *w, int64_t k,
                  Lookahead &ahead, typename Beside<W>::Sum *out, bool is_alone) {
    if (is_alone)
        return vector_rows<W, 1, NV, SUMS_OF_ONE / NV>(a, stride, w, k, AtHand{}, out);
    in_passes<MOST_ROWS<W>>(rows, [&](int first, auto n) {
        for (int v = 0; v < NV; v += SLICE)
            ahead.pass([&](auto asks) {
                vector_rows<W, n(), SLICE, 1>(a + first * stride, stride, w + v * VL * PACK<W>, k,
                                              asks, out + first * COLS + v * VL);
            });
    });
}

#ifdef HAS_TILES

bool ask_for_tiles() {  // Linux gives them to a process that asks
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

class TileConfig {  // of the calling thread, while it lives
  public:
    explicit TileConfig(bool has_tiles) : has_tiles(has_tiles) {
        if (!has_tiles) return;
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
        __asm__ volatile("" : : "r"(&config) : "memory");  // all of it is read
        _tile_loadconfig(&config);
    }
    ~TileConfig() {
        if (has_tiles) _tile_release();
    }

  private:
    bool has_tiles;
};

#define MULTIPLY_ADD(SUM, ACT, WEIGHT)                                          \
    do {                                                                        \
        if constexpr (std::is_same_v<W, int8_t>) _tile_dpbusd(SUM, ACT, WEIGHT); \
        else _tile_dpbf16ps(SUM, ACT, WEIGHT);                                  \
    } while (0)

// Tiles 0 to 3 add up 32 rows by 32 outputs, 4 and 5 are activations, 6 and 7 weights.
template <class W, bool TWO>
void tile_rows(const typename Beside<W>::Act *a, int64_t stride, const W *w, int64_t k,
               typename Beside<W>::Sum *out) {
    constexpr int STEP = 64 / sizeof(W);  // inputs of a tile
    const int64_t a_bytes = stride * sizeof(*a);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < k; i += STEP) {
        const char *at = (const char *)(w + i * COLS);
        const auto ask = [&](int quarter) {  // little at a time, or it holds up the tiles
            for (int o = 0; o < 512; o += 64)
                __builtin_prefetch(at + TILES_AHEAD + quarter * 512 + o, 0, 2);
        };
        ask(0);
        _tile_loadd(6, at, 128);
        ask(1);
        _tile_loadd(7, at + 64, 128);
        _tile_loadd(4, a + i, a_bytes);
        ask(2);
        MULTIPLY_ADD(0, 4, 6);
        ask(3);
        MULTIPLY_ADD(1, 4, 7);
        if constexpr (TWO) {
            _tile_loadd(5, a + 16 * stride + i, a_bytes);
            MULTIPLY_ADD(2, 5, 6);
            MULTIPLY_ADD(3, 5, 7);
        }
    }
    _tile_stored(0, out, COLS * 4);
    _tile_stored(1, out + 16, COLS * 4);
    if constexpr (TWO) {
        _tile_stored(2, out + 16 * COLS, COLS * 4);
        _tile_stored(3, out + 16 * COLS + 16, COLS * 4);
    }
}

template <class W>
void tile_block(const typename Beside<W>::Act *a, int64_t stride, int rows, const W *w, int64_t k,
                typename Beside<W>::Sum *out) {
    if (rows > 16) tile_rows<W, true>(a, stride, w, k, out);
    else tile_rows<W, false>(a, stride, w, k, out);
}

#else

bool ask_for_tiles() { return false; }
struct TileConfig {
    explicit TileConfig(bool) {}
};

#endif

// How rows go through panels here.
struct Machine {
    bool has_tiles, is_invariant;

    template <class W>
    bool uses_tiles(int64_t rows) const {
        constexpr int FEW = 4;  // rows below which tiles are mostly empty
        return !std::is_same_v<W, float> && has_tiles && (rows >= FEW || is_invariant);
    }

    // Whether this is a row that is added up in an order of its own.
    template <class W>
    bool is_alone(int64_t rows) const {
        return rows == 1 && !is_invariant && !std::is_same_v<W, int8_t>;
    }

    // Passes that so many rows take through a panel and that ask for something.
    template <class W>
    int64_t num_passes(int64_t rows) const {
        const auto of_block = [&](int64_t n) {
            const bool asks = !(uses_tiles<W>(n) || is_alone<W>(n));
            return asks ? (n + MOST_ROWS<W> - 1) / MOST_ROWS<W> * (NV / SLICE) : 0;
        };
        return rows / BLOCK_ROWS * of_block(BLOCK_ROWS) + of_block(rows % BLOCK_ROWS);
    }

    // `rows` up to BLOCK_ROWS through one panel. Memory of `a` is there for rows up to a multiple
    // of 16.
    template <class W>
    void block(const typename Beside<W>::Act *a, int64_t stride, int rows, const W *w, int64_t k,
               Lookahead &ahead, typename Beside<W>::Sum *out) const {
#ifdef HAS_TILES
        if constexpr (!std::is_same_v<W, float>)
            if (uses_tiles<W>(rows)) return tile_block(a, stride, rows, w, k, out);
#endif
        vector_block(a, stride, rows, w, k, ahead, out, is_alone<W>(rows));
    }
};

// Int8 activations as a panel takes them: shares of a row add up as integers, and a row as numbers.
struct Quantized {
    const Int8Act *acts;
    int64_t stride;
    const float *scales;  // [rows][num_shares]
    int64_t num_shares;

    Quantized after(int64_t rows) const {
        return {acts + rows * stride, stride, scales + rows * num_shares, num_shares};
    }
};

// What weights of a share add up to where activations are zero.
inline ivec zeros_of(const Linear &linear, int64_t share, int64_t output) {
    ivec sums;
    memcpy(&sums, linear.sums + share * linear.num_outputs + output, sizeof sums);
    return sums * ZERO;
}

// M rows through SLICE vectors of a panel, of which the first is `slice`.
template <int M, class Asks>
void share_rows(const Linear &linear, int64_t panel, int slice, Quantized rows, const int8_t *w,
                Asks asks, float *out) {
    static_assert(SHARE == STEPS * PACK<int8_t>, "a share is a run");
    const int64_t output = panel * COLS + slice * VL;
    w += slice * VL * PACK<int8_t>;
    out += slice * VL;
    for (int m = 0; m < M; m++)
        for (int v = 0; v < SLICE; v++) store(out + m * COLS + v * VL, vec{});
    for (int64_t share = 0; share * SHARE < linear.num_inputs; share++) {
        ivec part[M][SLICE];
        UNROLLED for (int v = 0; v < SLICE; v++) {
            const ivec zeros = zeros_of(linear, share, output + v * VL);
            UNROLLED for (int m = 0; m < M; m++) part[m][v] = -zeros;
        }
        const char *line = asks.of_run(share, w + share * SHARE * COLS);
        for (int64_t i = share * SHARE; i < (share + 1) * SHARE; i += PACK<int8_t>) {
            const int8_t *at = w + i * COLS;
            asks.ask(line);
            decltype(opened(load_packs(at))) packs[SLICE];
            UNROLLED for (int v = 0; v < SLICE; v++)
                packs[v] = opened(load_packs(at + v * VL * PACK<int8_t>));
            UNROLLED for (int m = 0; m < M; m++)
                UNROLLED for (int v = 0; v < SLICE; v++)
                    part[m][v] = dot(part[m][v], rows.acts + m * rows.stride + i, packs[v]);
        }
        UNROLLED for (int m = 0; m < M; m++)
            UNROLLED for (int v = 0; v < SLICE; v++) {
                float *to = out + m * COLS + v * VL;
                store(to, load(to) + __builtin_convertvector(part[m][v], vec) *
                                         rows.scales[m * rows.num_shares + share]);
            }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < SLICE; v++) {
            float *to = out + m * COLS + v * VL;
            store(to, load(to) * load(linear.scales + output + v * VL));
        }
}

#ifdef HAS_TILES

inline void tile_shares(const Linear &linear, int64_t panel, Quantized rows, int num_rows,
                        const int8_t *w, float *out) {
    alignas(64) int32_t sums[BLOCK_ROWS * COLS];
    for (int i = 0; i < num_rows * COLS; i++) out[i] = 0.f;
    for (int64_t share = 0; share * SHARE < linear.num_inputs; share++) {
        const int64_t first = share * SHARE;
        tile_block(rows.acts + first, rows.stride, num_rows, w + first * COLS, SHARE, sums);
        for (int v = 0; v < NV; v++) {
            const int64_t output = panel * COLS + v * VL;
            const ivec zeros = zeros_of(linear, share, output);
            const vec of_outputs = load(linear.scales + output);
            for (int m = 0; m < num_rows; m++) {
                ivec sum;
                memcpy(&sum, sums + m * COLS + v * VL, sizeof sum);
                float *to = out + m * COLS + v * VL;
                const vec part = __builtin_convertvector(sum - zeros, vec) * of_outputs;
                store(to, load(to) + part * rows.scales[m * rows.num_shares + share]);
            }
        }
    }
}

#endif

// `num_rows` up to BLOCK_ROWS through one panel.
inline void multiply_shares(const Machine &machine, const Linear &linear, int64_t panel,
                            Quantized rows, int num_rows, const int8_t *w, Lookahead &ahead,
                            float *out) {
#ifdef HAS_TILES
    if (machine.uses_tiles<int8_t>(num_rows))
        return tile_shares(linear, panel, rows, num_rows, w, out);
#endif
    in_passes<MOST_ROWS<int8_t>>(num_rows, [&](int first, auto n) {
        for (int v = 0; v < NV; v += SLICE)
            ahead.pass([&](auto asks) {
                share_rows<n()>(linear, panel, v, rows.after(first), w, asks, out + first * COLS);
            });
    });
}

// A row of n numbers, given VL at a time, as int8 takes it, with a scale for each share. What is no
// number stays none.
template <class Numbers>
void quantize(int64_t n, Numbers numbers, Int8Act *out, float *scales) {
    for (int64_t begin = 0; begin < n; begin += SHARE, scales++) {
        const int64_t end = std::min(n, begin + SHARE);
        vec most{}, none{};
        for (int64_t i = begin; i < end; i += VL) {
            const vec x = numbers(i);
            const vec size = pick(x < all(0.f), -x, x);
            most = pick(size > most, size, most);
            none += x * 0.f;
        }
        const float peak = max_of(most), factor = peak > 0 ? 127.f / peak : 0.f;
        for (int64_t i = begin; i < end; i += VL) {
            // Adding 1.5 * 2^23 rounds to the nearest integer, which then is in the lower bits.
            put_acts(out + i, (uvec)(numbers(i) * factor + (12582912.f + ZERO)));
        }
        *scales = peak / 127.f + sum_of(none);
    }
}

}  // namespace
