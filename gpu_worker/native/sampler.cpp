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

struct Rows {  // as native_sampler.py fills it; columns of num_rows numbers, unless said otherwise
    const float *logits;  // [num_rows][num_tokens]
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k;
    const uint64_t *seed;
    const int64_t *output_index;
    int64_t num_rows, num_tokens;
    int64_t *token_ids;  // -1: logits that were no numbers
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
    Draw(const Rows &rows, int64_t row, std::vector<float> &scores, std::vector<float> &likely)
        : row(rows.logits + row * rows.num_tokens), n(rows.num_tokens), scores(scores),
          likely(likely), temperature(rows.temperature[row]), top_p(rows.top_p[row]),
          min_p(rows.min_p[row]), top_k(rows.top_k[row] < n ? rows.top_k[row] : 0),
          key(key_of(rows.seed[row], rows.output_index[row])) {}

    int64_t token() {
        const float largest = find_largest();
        if (!std::isfinite(largest)) return -1;
        if (temperature == 0) return first_of(largest);
        make_scores(largest);
        return noisiest(threshold());
    }

  private:
    static vec at(const float *numbers, int64_t i, int64_t end) {  // beyond it: less than any
        if (i + VL <= end) return load(numbers + i);
        vec v = all(NONE);
        for (int64_t lane = 0; i + lane < end; lane++) v[lane] = numbers[i + lane];
        return v;
    }

    float find_largest() const {  // NaN if any is
        vec top = all(NONE);
        ivec none{};
        for (int64_t i = 0; i < n; i += VL) {
            const vec x = at(row, i, n);
            top = pick(x > top, x, top);
            none |= x != x;
        }
        return any(none) ? NAN : max_of(top);
    }

    int64_t first_of(float logit) const {  // which is there
        int64_t i = 0;
        while (!any(at(row, i, n) == logit)) i += VL;
        return std::find(row + i, row + n, logit) - row;
    }

    void make_scores(float largest) {
        scores.resize((n + VL - 1) / VL * VL);
        for (int64_t i = 0; i < n; i += VL)
            store(scores.data() + i, (at(row, i, n) - largest) / temperature);
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

    const float *row;
    const int64_t n;
    std::vector<float> &scores;  // (logit - the largest) / temperature
    std::vector<float> &likely;  // scores above a cut
    const float temperature, top_p, min_p;
    const int64_t top_k;  // 0: off
    const uint64_t key;
};

}  // namespace

extern "C" void sample(const Rows *rows) {
#pragma omp parallel if (rows->num_rows > 1)
    {
        std::vector<float> scores, likely;
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < rows->num_rows; row++)
            rows->token_ids[row] = Draw(*rows, row, scores, likely).token();
    }
}
