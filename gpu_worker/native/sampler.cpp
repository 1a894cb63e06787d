// One token for each row of logits: what sampler.py describes, row by row, in one pass or few.
//
// The likely tokens are few. So where order matters (top-k, top-p), only those above a cut are put
// in order, and the cut is lowered until they are enough.

#include <functional>
#include <vector>

#include "numbers.h"

namespace {

constexpr float FIRST_CUT = -8.f;  // of the scores that are looked at first; then twice as low
constexpr float LOWEST_CUT = -1e4f;
constexpr int FEW = 64;  // numbers that are put in order; vectors added up in single precision

constexpr int64_t NO_TOKEN = -1;  // of logits that were no numbers

struct Columns {  // as native_sampler.py fills it: how each of a worker's rows samples
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k;
    const uint64_t *seed;
};

inline vec logv(vec x) {  // x > 0 and normal; by the series of artanh, relative error < 2e-7
    constexpr int32_t ROOT_OF_HALF = 0x3f3504f3;
    const ivec bits = (ivec)x, exponent = (bits - ROOT_OF_HALF) >> 23;
    const vec f = (vec)(bits - (exponent << 23)) - 1.f;  // in [sqrt(1/2) - 1, sqrt(2) - 1)
    const vec s = f / (2.f + f), s2 = s * s;
    const vec series = 1.f + s2 * (1 / 3.f + s2 * (1 / 5.f + s2 * (1 / 7.f + s2 * (1 / 9.f))));
    return __builtin_convertvector(exponent, vec) * 0.69314718f + 2.f * s * series;
}

inline uint64_t mixed(uint64_t x) {  // the finaliser of splitmix64
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// What the noise of an output token starts from: see sampler.py.
inline uint64_t key_of(uint64_t seed, int64_t output_index) {
    constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15u;
    return mixed(mixed(seed) + (uint64_t(output_index) + 1) * GOLDEN);
}

// VL neighbouring tokens' random numbers in (0, 1), for a row: see sampler.py.
inline vec uniform(uvec token, uint32_t multiplier, uint32_t offset) {
    uvec bits = token * multiplier + offset;
    bits ^= bits >> 16;
    bits *= 0x85ebca6bu;
    bits ^= bits >> 13;
    bits *= 0xc2b2ae35u;
    bits ^= bits >> 16;
    bits &= 0x7fffffffu;
    constexpr float ALMOST_ONE = 1.f - 0x1p-24f;
    const vec u = (__builtin_convertvector((ivec)bits, vec) + 0.5f) * 0x1p-31f;
    return pick(u > ALMOST_ONE, all(ALMOST_ONE), u);
}

inline vec gumbel(vec u) {
    // log1p(-u): what rounding took from 1 - u is given back (Kahan); of a tiny u it takes all.
    const vec rest = 1.f - u, lost = rest - 1.f;
    const vec exponential = pick(lost == 0.f, u, logv(rest) * u / lost);
    return -logv(exponential);
}

class Draw {  // of one row
  public:
    Draw(const Columns &columns, int64_t row, int64_t output_index, const float *logits, int64_t n,
         std::vector<float> &scores, std::vector<float> &likely)
        : logits(logits), n(n), scores(scores), likely(likely),
          temperature(columns.temperature[row]), top_p(columns.top_p[row]),
          min_p(columns.min_p[row]), top_k(columns.top_k[row] < n ? columns.top_k[row] : 0),
          key(key_of(columns.seed[row], output_index)) {}

    int64_t token() {
        const auto [logit, token] = largest();
        if (!std::isfinite(logit)) return NO_TOKEN;
        if (temperature == 0) return token;
        make_scores(logit);
        return noisiest(threshold());
    }

  private:
    static vec at(const float *numbers, int64_t i, int64_t end) {  // beyond it: less than any
        if (i + VL <= end) return load(numbers + i);
        vec v = all(NONE);
        for (int64_t lane = 0; i + lane < end; lane++) v[lane] = numbers[i + lane];
        return v;
    }

    struct Logit {
        float value;  // NaN if any of the row is
        int64_t token;  // the lowest of equals
    };

    Logit largest() const {
        constexpr int U = 4;  // vectors that are compared by turns: a comparison has a latency
        vec top[U];
        uvec place[U];  // in the row, of each lane's largest, in turns
        ivec none{};
        UNROLLED for (int u = 0; u < U; u++) top[u] = all(NONE), place[u] = uvec{};
        for (int64_t i = 0; i < n; i += U * VL)
            UNROLLED for (int u = 0; u < U; u++) {
                const vec x = at(logits, i + u * VL, n);
                const ivec is_larger = x > top[u];
                top[u] = pick(is_larger, x, top[u]);
                place[u] = (uvec)pick(is_larger, (vec)(uvec{} + uint32_t(i / VL)), (vec)place[u]);
                none |= x != x;
            }
        if (any(none)) return {NAN, NO_TOKEN};
        Logit found{NONE, n};
        for (int u = 0; u < U; u++) found.value = std::max(found.value, max_of(top[u]));
        for (int u = 0; u < U; u++)
            for (int lane = 0; lane < VL; lane++)
                if (top[u][lane] == found.value)
                    found.token = std::min(found.token, (int64_t(place[u][lane]) + u) * VL + lane);
        return found;
    }

    void make_scores(float largest) {
        scores.resize((n + VL - 1) / VL * VL);
        for (int64_t i = 0; i < n; i += VL)
            store(scores.data() + i, (at(logits, i, n) - largest) / temperature);
    }

    // The lowest score that may be drawn.
    float threshold() {
        float floor = min_p > 0 ? std::log(min_p) : NONE;
        if (top_k > 0) {
            float cut = FIRST_CUT;
            while (collect(cut), int64_t(likely.size()) < top_k && cut != NONE) cut = lower(cut);
            std::nth_element(likely.begin(), likely.begin() + (top_k - 1), likely.end(),
                             std::greater<float>());
            floor = std::max(floor, likely[top_k - 1]);
        }
        return top_p < 1 ? std::max(floor, nucleus(floor)) : floor;
    }

    // The lowest score of the smallest set that has top_p of the mass of all that reach the floor.
    float nucleus(float floor) {
        const double enough = top_p * mass(scores.data(), n, floor);
        float cut = std::max(FIRST_CUT, floor);
        while (cut > floor && mass(scores.data(), n, cut) < enough)
            cut = std::max(lower(cut), floor);
        collect(cut);
        // The half that holds the end of the set, of what is left of them, again and again.
        const auto begin = likely.begin();
        int64_t first = 0, end = likely.size();
        double before = 0;
        while (end - first > FEW) {
            const int64_t middle = (first + end) / 2;
            std::nth_element(begin + first, begin + middle, begin + end, std::greater<float>());
            const double upper = mass(likely.data() + first, middle - first, NONE);
            if (before + upper >= enough) end = middle;
            else before += upper, first = middle;
        }
        std::sort(begin + first, begin + end, std::greater<float>());
        while (first < end - 1 && (before += std::exp(likely[first])) < enough) first++;
        return likely[first];
    }

    static float lower(float cut) { return cut > LOWEST_CUT ? 2 * cut : NONE; }

    void collect(float cut) {  // the largest score, which is 0, is among them in any case
        likely.clear();
        for (int64_t i = 0; i < n; i += VL) {
            const ivec reaches = load(scores.data() + i) >= cut;
            if (!any(reaches)) continue;
            for (int64_t lane = 0; lane < VL && i + lane < n; lane++)
                if (reaches[lane]) likely.push_back(scores[i + lane]);
        }
    }

    static double mass(const float *numbers, int64_t count, float floor) {  // of those that reach it
        double sum = 0;
        for (int64_t begin = 0; begin < count; begin += FEW * VL) {
            vec some{};
            for (int64_t i = begin; i < std::min(count, begin + FEW * VL); i += VL) {
                const vec x = at(numbers, i, count);
                some += pick(x >= floor, exp2v(x * LOG2E), vec{});
            }
            sum += sum_of(some);
        }
        return sum;
    }

    // The token whose score with noise is largest, of those that reach the threshold; the lowest
    // token of equals.
    int64_t noisiest(float threshold) const {
        const uint32_t multiplier = uint32_t(key >> 32) | 1, offset = uint32_t(key);
        uvec token, best_token{};
        for (int i = 0; i < VL; i++) token[i] = i;
        vec best = all(NONE);
        float leading = NONE;
        for (int64_t i = 0; i < n; i += VL, token += VL) {
            const vec x = load(scores.data() + i);
            if (!any(x >= threshold)) continue;
            // x + gumbel(u) > leading means u < 1 - exp(-exp(x - leading)), which is less than
            // exp(x - leading): of most tokens it is plain that they cannot win.
            const vec u = uniform(token, multiplier, offset);
            const vec lag = x - leading;
            const vec bound = exp2v(pick(lag < 0.f, lag, vec{}) * LOG2E) * 1.0001f;
            if (!any((x >= threshold) & (u <= bound))) continue;
            const vec noisy = pick(x >= threshold, x + gumbel(u), all(NONE));
            const ivec better = noisy > best;
            best = pick(better, noisy, best);
            best_token = (uvec)pick(better, (vec)token, (vec)best_token);
            leading = max_of(best);
        }
        const float winner = max_of(best);
        uint32_t found = UINT32_MAX;
        for (int i = 0; i < VL; i++)
            if (best[i] == winner) found = std::min(found, best_token[i]);
        return found;
    }

    const float *logits;
    const int64_t n;
    std::vector<float> &scores;  // (logit - the largest) / temperature
    std::vector<float> &likely;  // scores above a cut
    const float temperature, top_p, min_p;
    const int64_t top_k;  // 0: off
    const uint64_t key;
};

}  // namespace

// Output token output_index[i] of row rows[i], from the logits [n][num_tokens].
extern "C" void sample(const Columns *columns, int64_t n, int64_t num_tokens, const float *logits,
                       const int64_t *rows, const int64_t *output_index, int64_t *token_ids) {
#pragma omp parallel if (n > 1)
    {
        std::vector<float> scores, likely;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n; i++)
            token_ids[i] = Draw(*columns, rows[i], output_index[i], logits + i * num_tokens,
                                num_tokens, scores, likely)
                               .token();
    }
}
