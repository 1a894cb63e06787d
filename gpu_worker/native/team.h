// Threads that go through the same phases together, each phase cut into items.
//
// Each has a part of the items, which lie together, and helps the others when it is done with it.
// So a thread that lost its core to another process holds up the others by what it took last: one
// item, or a few small ones. At the end of a phase they wait for one another: for a moment by
// looking again and again, then by giving the core away each time, since on a busy machine the
// thread that is waited for may need it.

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
    explicit Team(int64_t num_threads) : parts{Parts(num_threads), Parts(num_threads)} {}

  private:
    friend class Member;
    struct alignas(64) Part {
        std::atomic<int64_t> num_taken{0};  // of its items
    };
    using Parts = std::vector<Part>;
    Parts parts[2];  // of the members in this phase, and in the next
    alignas(64) std::atomic<int> num_arrived{0};
    alignas(64) std::atomic<int> num_phases{0};  // that are over
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
        team.parts[(phase + 1) % 2][me].num_taken.store(0, std::memory_order_relaxed);
        for (int i = 0, whose = me; i < size; i++, whose = (whose + 1) % size) {
            const auto [begin, end] = part(num_items, whose);
            std::atomic<int64_t> &num_taken = team.parts[phase % 2][whose].num_taken;
            while (begin + num_taken.load(std::memory_order_relaxed) < end) {
                int64_t at = begin + num_taken.fetch_add(at_once, std::memory_order_relaxed);
                for (const int64_t stop = std::min(end, at + at_once); at < stop; at++) item(at);
            }
        }
        meet();
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

    void meet() {
        const int now = phase++;
        if (team.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            team.num_arrived.store(0, std::memory_order_relaxed);
            team.num_phases.store(now + 1, std::memory_order_release);
            return;
        }
        constexpr int LOOKS = 2000;
        for (int i = 0; team.num_phases.load(std::memory_order_acquire) <= now; i++) {
            if (i > LOOKS) sched_yield();
#ifdef __x86_64__
            else __builtin_ia32_pause();
#endif
        }
    }

    Team &team;
    const int size, me;
    int phase = 0;
    double *const seconds;
    double last;
};

}  // namespace
