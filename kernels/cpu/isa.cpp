// Which table of kernels runs: the best that the processor and the system allow, or one that was asked for.
#include <atomic>
#include <cstring>
#include <initializer_list>

#include "ops.h"

namespace penjing {
namespace {

std::atomic<const Ops*> chosen{nullptr};

// The compiler's run-time checks include the operating system's saving of wide registers (XGETBV).
bool runs(const char* name) {
    if (!strcmp(name, "scalar")) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (!strcmp(name, "avx2")) return avx2;
    if (!strcmp(name, "avx512_vnni")) {
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    }
#endif
    return false;
}

const Ops* table(const char* name) {
    if (!strcmp(name, "scalar")) return &scalar_ops();
#if defined(__x86_64__)
    if (!strcmp(name, "avx2")) return &avx2_ops();
    if (!strcmp(name, "avx512_vnni")) return &avx512_ops();
#endif
    return nullptr;
}

const Ops* best() {
    for (const char* name : {"avx512_vnni", "avx2"})
        if (runs(name)) return table(name);
    return table("scalar");
}

}  // namespace

const Ops& ops() {
    const Ops* current = chosen.load(std::memory_order_acquire);
    if (current == nullptr) {
        current = best();
        chosen.store(current, std::memory_order_release);
    }
    return *current;
}

int select_ops(const char* name) {
    if (!strcmp(name, "auto")) {
        chosen.store(best(), std::memory_order_release);
        return 0;
    }
    const Ops* wanted = table(name);
    if (wanted == nullptr) return -1;
    if (!runs(name)) return -2;
    chosen.store(wanted, std::memory_order_release);
    return 0;
}

}  // namespace penjing
