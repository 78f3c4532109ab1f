#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

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

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>* word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// Returns when `word` no longer holds `seen`.
void await_change(std::atomic<uint32_t>& word, uint32_t seen, std::atomic<uint32_t>& sleepers) {
    for (int spin = 0; spin < SPINS; ++spin) {
        if (word.load(std::memory_order_acquire) != seen) return;
        relax();
    }
    sleepers.fetch_add(1);
    while (word.load() == seen) futex_wait(&word, seen);
    sleepers.fetch_sub(1);
}

// Sequentially consistent on both sides: either the waker sees the sleeper or the sleeper sees the new value.
void change(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& sleepers) {
    word.store(value);
    if (sleepers.load() != 0) futex_wake(&word);
}

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
        work_ = work;
        context_ = context;
        active_ = most < members_ ? most : members_;
        change(round_, round_.load() + 1, sleepers_);
        work(Team{0, active_, &barrier_}, context);
        done_.wait(static_cast<uint32_t>(members_));
    }

private:
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
    int members_ = 1, active_ = 1;
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

void Barrier::wait(uint32_t members) {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == members) {
        arrived_.store(0, std::memory_order_relaxed);
        change(phase_, phase + 1, sleepers_);
    } else {
        await_change(phase_, phase, sleepers_);
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
