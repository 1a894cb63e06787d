// Threads that go through the same phases together, each phase cut into items.
//
// Whoever is free takes the next item, so a thread that lost its core to another process holds up
// the others by what it took last: one item, or a few small ones. At the end of a phase they wait
// for one another: for a moment by looking again and again, then by giving the core away each time,
// since on a busy machine the thread that is waited for may need it.

#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace {

struct Team {
    struct alignas(64) Counter {
        std::atomic<int64_t> next{0};
    };
    Counter counters[3];  // items of the phase before, of this one and of the next
    alignas(64) std::atomic<int> num_arrived{0};
    alignas(64) std::atomic<int> num_phases{0};  // that are over
};

class Member {  // one thread's part in a team; made in a parallel region
  public:
    // `seconds` counts, by kind, the time of phases as one of the members sees it.
    Member(Team &team, double *seconds)
        : team(team), size(omp_get_num_threads()),
          seconds(omp_get_thread_num() == 0 ? seconds : nullptr), last(now_s()) {}

    // Returns when all items are done. Taking one costs as much as some numbers' worth of work, so
    // small items are taken several at once.
    template <class Item>
    void each(int kind, int64_t num_items, Item item, bool are_small = false) {
        constexpr int64_t TURNS = 4;
        const int64_t at_once = are_small ? num_items / (TURNS * size) + 1 : 1;
        std::atomic<int64_t> &next = team.counters[phase % 3].next;
        for (int64_t i; (i = next.fetch_add(at_once, std::memory_order_relaxed)) < num_items;)
            for (const int64_t end = std::min(num_items, i + at_once); i < end; i++) item(i);
        meet();
        if (!seconds) return;
        const double now = now_s();
        seconds[kind] += now - last;
        last = now;
    }

  private:
    static double now_s() {
        const auto now = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration<double>(now).count();
    }

    void meet() {
        const int now = phase++;
        if (team.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            team.num_arrived.store(0, std::memory_order_relaxed);
            team.counters[(now + 2) % 3].next.store(0, std::memory_order_relaxed);
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
    const int size;
    int phase = 0;
    double *const seconds;
    double last;
};

}  // namespace
