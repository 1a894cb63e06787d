// Phases of a team that test_team.py looks into.

#include "team.h"

// Each phase's items count themselves in `times`. Returns how many began before all items of the
// phase before theirs were done.
extern "C" int64_t run_phases(int64_t num_threads, int64_t num_phases, int64_t num_items,
                              bool are_small, int64_t *times) {
    std::vector<std::atomic<int64_t>> counts(num_phases * num_items);
    std::atomic<int64_t> num_early{0};
    Team team(num_threads);
#pragma omp parallel num_threads(num_threads)
    {
        Member my(team, nullptr);
        for (int64_t phase = 0; phase < num_phases; phase++)
            my.each(0, num_items, [&](int64_t item) {
                for (int64_t i = 0; phase && i < num_items; i++)
                    if (!counts[(phase - 1) * num_items + i].load()) num_early++;
                if ((phase + item) % 3 == 0) sched_yield();
                counts[phase * num_items + item]++;
            }, are_small);
    }
    std::copy(counts.begin(), counts.end(), times);
    return num_early;
}

// One of two members is away from phase `leaves` on, until the other is through with all of them.
// Returns how many items it did, or -1 if the other could not do without it.
extern "C" int64_t leave(int64_t leaves, int64_t num_phases, int64_t num_items, double patience_s) {
    std::atomic<bool> is_over{false}, is_held_up{false};
    int64_t num_done_late = 0;
    Team team(2);
#pragma omp parallel num_threads(2)
    {
        Member my(team, nullptr);
        const bool leaver = omp_get_thread_num() == 1;
        for (int64_t phase = 0; phase < num_phases; phase++) {
            const double until = omp_get_wtime() + patience_s;
            while (leaver && phase == leaves && !is_over && !is_held_up) {
                sched_yield();
                if (omp_get_wtime() > until) is_held_up = true;
            }
            my.each(0, num_items, [&](int64_t) {
                if (leaver && phase >= leaves) num_done_late++;
            });
        }
        if (!leaver) is_over = true;
    }
    return is_held_up ? -1 : num_done_late;
}
