// What a thread asks memory for while it computes products.
//
// Weights and cache come from memory once in a step, and rows go through a panel of weights a few
// at a time: only the first of these passes would wait for memory, and then attention would. So a
// pass asks, a line with each of its steps, for what its thread needs next: the panel after this
// one, then keys and values. Asking for more at a time is slower: lines that are on their way hold
// up those that are needed at once.

#pragma once

#include <algorithm>
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

// What a pass asks for: a run of it from `of_run` on, a step of that by `ask`.
struct AtHand {  // the weights that it goes through, if nobody asked for them before
    const char *of_run(int64_t, const void *weights) const { return (const char *)weights + LEAD; }

    void ask(const char *&line) const {
        __builtin_prefetch(line);
        __builtin_prefetch(line + LINE);
        line += 2 * LINE;
    }
};

struct Pieces {
    const char *const *begin;  // one for each run

    const char *of_run(int64_t run, const void *) const { return begin[run]; }

    void ask(const char *&line) const {
        __builtin_prefetch(line);
        line += LINE;
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

    // Calls `run` with what the next of these passes asks for.
    template <class Run>
    void pass(Run run) {
        if (!is_near || num_taken + num_runs > num_pieces) {
            is_near = true;
            return run(AtHand{});
        }
        num_taken += num_runs;
        run(Pieces{pieces.data() + num_taken - num_runs});
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
