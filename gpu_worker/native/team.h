// Threads that go through the same phases together, each phase cut into items.
//
// Each has a part of the items, which lie together, and helps the others when it is done with it. A
// phase is over when its items are done, not when all have been there: a thread that lost its core
// to another process holds up the others if it has items in hand, or has not told of them yet, and
// else not. When it is back it finds the items of the phases that it missed taken, and passes on.
//
// Who waits looks again and again for a moment, then gives the core away each time, since on a busy
// machine the thread that is waited for may need it.

#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace {

class Team {
  public:
    explicit Team(int64_t num_threads) : parts(num_threads) {}

  private:
    friend class Member;
    struct alignas(64) Part {
        std::atomic<int64_t> taken{0};  // the latest phase << 32, and how many of its items
    };
    std::vector<Part> parts;  // of the members
    alignas(64) std::atomic<int64_t> num_done{0};  // items, of all phases
};

struct Range {
    int64_t begin, end;
};

class Member {  // one thread's part in a team; made in a parallel region
  public:
    // `seconds` counts, by kind, the time of phases as one of the members sees it.
    Member(Team &team, double *seconds)
        : team(team), size(omp_get_num_threads()), me(omp_get_thread_num()),
          seconds(me == 0 ? seconds : nullptr), last(now_s()) {}

    // Those of so many items that are this member's.
    Range mine(int64_t num_items) const { return part(num_items, me); }

    // Returns when all items are done. Taking one costs as much as some numbers' worth of work, so
    // small items are taken several at once.
    template <class Item>
    void each(int kind, int64_t num_items, Item item, bool are_small = false) {
        constexpr int64_t TURNS = 4;
        const int64_t at_once = are_small ? num_items / (TURNS * size) + 1 : 1;
        int64_t num_done = 0;
        for (int i = 0, whose = me; i < size; i++, whose = (whose + 1) % size) {
            const auto [begin, end] = part(num_items, whose);
            for (int64_t at; (at = begin + take(whose, end - begin, at_once)) < end;)
                for (const int64_t stop = std::min(end, at + at_once); at < stop; at++) {
                    item(at);
                    num_done++;
                }
        }
        if (num_done) team.num_done.fetch_add(num_done, std::memory_order_release);
        phase++;
        num_before += num_items;
        wait();
        if (!seconds) return;
        const double now = now_s();
        seconds[kind] += now - last;
        last = now;
    }

  private:
    Range part(int64_t num_items, int64_t whose) const {
        return {num_items * whose / size, num_items * (whose + 1) / size};
    }

    static double now_s() {
        const auto now = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration<double>(now).count();
    }

    // Takes the next items of a member's part of this phase; how many were taken before them.
    int64_t take(int whose, int64_t num_items, int64_t at_once) {
        std::atomic<int64_t> &taken = team.parts[whose].taken;
        const int64_t none = phase << 32, all = none + num_items;  // a later phase has more than all
        int64_t now = taken.load(std::memory_order_relaxed), before;
        do {
            before = std::max(now, none);
            if (before >= all) return num_items;
        } while (!taken.compare_exchange_weak(now, before + at_once, std::memory_order_relaxed));
        return before - none;
    }

    // Returns when all items so far are done.
    void wait() const {
        constexpr int LOOKS = 2000;
        for (int i = 0; team.num_done.load(std::memory_order_acquire) < num_before; i++) {
            if (i > LOOKS) sched_yield();
#ifdef __x86_64__
            else __builtin_ia32_pause();
#endif
        }
    }

    Team &team;
    const int size, me;
    int64_t phase = 0, num_before = 0;  // and the items of those before it
    double *const seconds;
    double last;
};

}  // namespace
