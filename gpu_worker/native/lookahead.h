// What a thread asks memory for while it computes products.
//
// Weights and cache come from memory once in a step, and rows go through a panel of weights a few
// at a time: only the first of these passes would wait for memory, and then attention would. So a
// pass asks, a line with each of its steps, for what its thread needs next: the panel after this
// one, then keys and values. Asking for more at a time is slower: lines that are on their way hold
// up those that are needed at once.

#pragma once

#include <cstdint>
#include <vector>

namespace {

constexpr int64_t LINE = 64;  // bytes
constexpr int STEPS = 16;     // of an inner loop: a run
constexpr int64_t RUN = STEPS * 2 * LINE;  // bytes of weights that a run goes through
constexpr int64_t PIECE = STEPS * LINE;    // bytes that a run asks for meanwhile
constexpr int64_t LEAD = 4096;  // bytes of the weights at hand that are asked for before their turn

struct Panel {
    const char *begin = nullptr;
    int64_t size = 0;  // bytes: whole runs
};

// What a pass asks for.
struct Asks {
    const char *const *pieces = nullptr;  // one for each run; none: the weights at hand
    int64_t stride = 2 * LINE;            // bytes a step

    const char *of_run(int64_t run, const void *weights) const {
        return pieces ? pieces[run] : (const char *)weights + LEAD;
    }

    // In the next step of a run that asks from `line` on.
    void ask(const char *&line) const {
        __builtin_prefetch(line);
        __builtin_prefetch(line + stride - LINE);  // the same line, unless a step asks for two
        line += stride;
    }
};

class Lookahead {
  public:
    // Lay out what so many passes through a panel ask for. `more` gives the address of a piece that
    // is needed after the next panel, or none.
    template <class More>
    void begin(Panel panel, Panel next, int64_t num_passes, More more) {
        num_runs = panel.size / RUN;
        is_near = panel.begin == known;
        num_taken = num_pieces = 0;
        const int64_t most = std::max<int64_t>(num_passes - !is_near, 0) * num_runs;
        if (int64_t(pieces.size()) < most) pieces.resize(most);
        if (is_near) add_rest(most);
        rest = next.begin, rest_end = next.begin + next.size;
        add_rest(most);
        known = rest == next.begin ? nullptr : next.begin;
        while (num_pieces < most) {
            const char *piece = more();
            if (!piece) break;
            pieces[num_pieces++] = piece;
        }
        while (num_pieces < most) pieces[num_pieces++] = panel.begin;  // nothing: it is near
    }

    // What the next of these passes asks for.
    Asks pass() {
        if (!is_near || num_taken + num_runs > num_pieces) {
            is_near = true;  // when the pass is over
            return {};
        }
        const Asks asks{pieces.data() + num_taken, LINE};
        num_taken += num_runs;
        return asks;
    }

  private:
    void add_rest(int64_t most) {
        for (; num_pieces < most && rest < rest_end; rest += PIECE) pieces[num_pieces++] = rest;
    }

    std::vector<const char *> pieces;
    int64_t num_pieces = 0, num_taken = 0, num_runs = 0;
    bool is_near = false;         // the panel at hand
    const char *known = nullptr;  // the panel that was asked for, except for its rest
    const char *rest = nullptr, *rest_end = nullptr;
};

}  // namespace
