// A persistent team of threads that runs one function on every member, with a barrier inside.
//
// Not OpenMP: torch bundles a libgomp of its own under another name, so a second runtime would add a second set of
// spinning workers, and a forked child of an OpenMP program hangs. Members spin briefly, then sleep on a futex. Where
// other programs take the cores, and a team would mostly wait for members that do not run, the caller works alone.
#pragma once

#include <atomic>
#include <cstdint>

namespace penjing {

// Memory that a member reads after a barrier: it is fetched into the cache by those who wait.
struct Soon {
    const void* at = nullptr;
    int64_t bytes = 0;
};

// Waits until all members have come; writes before it are seen after it.
class alignas(64) Barrier {
public:
    void wait(uint32_t members, Soon soon = {});

private:
    std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    std::atomic<uint32_t> sleepers_{0};
};

struct Team {
    int member;
    int members;
    Barrier* barrier;
    void sync(Soon soon = {}) const {
        if (members > 1) barrier->wait(static_cast<uint32_t>(members), soon);
    }
};

// A breath between two looks at what another thread will write.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

using Work = void (*)(const Team& team, void* context);

// Runs `work` once on each of at most `most` members, the caller being member 0; returns when all are done. Callers take
// turns. `most` is what the caller made room for: the pool may have grown since. There may be fewer members, down to one.
void run_team(Work work, void* context, int most);

int num_threads();
// At least 1; waits for a running call. Threads that cannot be started reduce the team.
void set_num_threads(int count);

// [begin, end) of `total` items for one of `members`, as even as whole items allow.
inline int64_t share(int64_t total, int member, int members) { return total * member / members; }

}  // namespace penjing
