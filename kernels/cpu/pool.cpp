#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace penjing {
namespace {

// About 50 µs, more than any phase of a decode step lasts; after it the core is left to others.
constexpr int SPINS = 2000;
// A wake-up takes up to so long on a quiet machine; waiting longer means that others have the cores.
constexpr int64_t LONG_WAIT = 200'000;  // ns
// Most calls that the caller makes alone before it tries the team again.
constexpr int64_t MOST_ALONE = 64;

using Clock = std::chrono::steady_clock;
int64_t nanoseconds(Clock::duration time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}
thread_local int64_t slept = 0;  // ns that this thread has waited on a futex

void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>* word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Returns when `word` no longer holds `seen`; meanwhile fetches what is needed next.
void await_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& sleepers, Soon soon = {}) {
    for (int64_t at = 0; at < soon.bytes; at += 64) {
        if (word.load(std::memory_order_acquire) != seen) return;
        __builtin_prefetch(static_cast<const char*>(soon.at) + at, 0, 2);
    }
    for (int spin = 0; spin < SPINS; ++spin) {
        if (word.load(std::memory_order_acquire) != seen) return;
        relax();
    }
    const Clock::time_point start = Clock::now();
    sleepers.fetch_add(1);
    while (word.load() == seen) futex_wait(&word, seen);
    sleepers.fetch_sub(1);
    slept += nanoseconds(Clock::now() - start);
}

// Sequentially consistent on both sides: either the waker sees the sleeper or the sleeper sees the new value.
void change(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& sleepers) {
    word.store(value);
    if (sleepers.load() != 0) futex_wake(&word);
}

// Keeps workers off the caller's core. A woken thread is readily put on the core of the one that wakes it, and waits there
// until the scheduler moves one of them: for milliseconds two cores did the work of one (GEMM at 0.5–0.7 of its speed).
class Apart {
public:
    Apart() {
        if (sched_getaffinity(0, sizeof allowed_, &allowed_) != 0) CPU_ZERO(&allowed_);
    }

    void keep(std::vector<std::thread>& workers) {
        const int caller = sched_getcpu();
        if (caller == caller_) return;
        caller_ = caller;
        const bool room = CPU_COUNT(&allowed_) > static_cast<int>(workers.size());
        if (caller < 0 || caller >= CPU_SETSIZE || !CPU_ISSET(caller, &allowed_) || !room) return;
        cpu_set_t others = allowed_;
        CPU_CLR(caller, &others);
        for (std::thread& worker : workers) pthread_setaffinity_np(worker.native_handle(), sizeof others, &others);
    }

private:
    cpu_set_t allowed_;
    int caller_ = -1;
};

class Pool {
public:
    explicit Pool(int count) {
        sigset_t all, old;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);  // signals stay with the threads of the host program
        for (int member = 1; member < count; ++member) {
            try {
                threads_.emplace_back([this, member] { serve(member); });
            } catch (const std::system_error&) {
                break;
            }
        }
        pthread_sigmask(SIG_SETMASK, &old, nullptr);
        members_ = static_cast<int>(threads_.size()) + 1;
    }

    ~Pool() {
        work_ = nullptr;
        change(round_, round_.load() + 1, sleepers_);
        for (std::thread& thread : threads_) thread.join();
    }

    void run(Work work, void* context, int most) {
        if (alone_ > 0) {
            --alone_;
            Barrier unused;
            work(Team{0, 1, &unused}, context);
            return;
        }
        const Clock::time_point start = Clock::now();
        const int64_t slept_before = slept;
        apart_.keep(threads_);
        work_ = work;
        context_ = context;
        active_ = most < members_ ? most : members_;
        change(round_, round_.load() + 1, sleepers_);
        work(Team{0, active_, &barrier_}, context);
        done_.wait(static_cast<uint32_t>(members_));
        judge(nanoseconds(Clock::now() - start), slept - slept_before);
    }

private:
    // The caller was at work for lasted − lost: alone it would have needed about so long for each member's share. While
    // that is less, it works alone, twice as many calls each time.
    void judge(int64_t lasted, int64_t lost) {
        const bool worse = lost > LONG_WAIT && active_ * (lasted - lost) < lasted;
        retreat_ = !worse ? 0 : retreat_ == 0 ? 1 : retreat_ < MOST_ALONE ? 2 * retreat_ : MOST_ALONE;
        alone_ = retreat_;
    }

    void serve(int member) {
        uint32_t round = 0;
        for (;;) {
            await_change(round_, round, sleepers_);
            ++round;
            if (work_ == nullptr) return;
            if (member < active_) work_(Team{member, active_, &barrier_}, context_);
            done_.wait(static_cast<uint32_t>(members_));
        }
    }

    std::vector<std::thread> threads_;
    Apart apart_;
    int members_ = 1, active_ = 1;
    int64_t alone_ = 0, retreat_ = 0;  // calls without the team: left, and of the present retreat
    Work work_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint32_t> round_{0};
    std::atomic<uint32_t> sleepers_{0};
    Barrier barrier_, done_;
};

struct State {
    std::mutex turn;
    Pool* pool = nullptr;
    int wanted = 1;
};

// Never destroyed: a daemon thread may still be inside a call when the process ends.
alignas(State) unsigned char state_memory[sizeof(State)];
State* state = nullptr;
std::once_flag state_made;

// A forked child has none of the workers, and perhaps a locked mutex: it starts anew, with the same number wanted.
void start_anew() {
    const int wanted = state->wanted;
    state = new (state_memory) State;
    state->wanted = wanted;
}

State& the_state() {
    std::call_once(state_made, [] {
        state = new (state_memory) State;
        pthread_atfork(nullptr, nullptr, start_anew);
    });
    return *state;
}

}  // namespace

void Barrier::wait(uint32_t members, Soon soon) {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
        arrived_.store(0, std::memory_order_relaxed);
        change(phase_, phase + 1, sleepers_);
    } else {
        await_change(phase_, phase, sleepers_, soon);
    }
}

void run_team(Work work, void* context, int most) {
    State& shared = the_state();
    std::lock_guard<std::mutex> turn(shared.turn);
    if (shared.wanted == 1 || most == 1) {
        Barrier alone;
        work(Team{0, 1, &alone}, context);
        return;
    }
    if (shared.pool == nullptr) shared.pool = new Pool(shared.wanted);
    shared.pool->run(work, context, most);
}

int num_threads() {
    State& shared = the_state();
    std::lock_guard<std::mutex> turn(shared.turn);
    return shared.wanted;
}

void set_num_threads(int count) {
    State& shared = the_state();
    std::lock_guard<std::mutex> turn(shared.turn);
    if (count == shared.wanted) return;
    delete shared.pool;
    shared.pool = nullptr;
    shared.wanted = count < 1 ? 1 : count;
}

}  // namespace penjing
