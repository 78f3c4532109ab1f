// Which table of kernels runs: the best that the processor and the system allow, or one that was asked for.
#include <atomic>
#include <cstring>
#include <initializer_list>

#include "ops.h"

#if defined(PJ_HAS_AMX) || defined(PJ_HAS_AVX_VNNI)
#include <cpuid.h>
#endif
#if defined(PJ_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace penjing {
namespace {

std::atomic<const Ops*> chosen{nullptr};

#if defined(PJ_HAS_AMX)
// Whether the processor has tiles for bytes and bfloat16, the system saves them, and this process may use them. Linux (since 5.16)
// keeps room for them only in processes that ask; threads and forked children inherit the answer.
bool amx_permitted() {
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, OSXSAVE = 1u << 27, SAVED = 0x60000u;
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM)
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & TILE) || !(d & INT8) || !(d & BF16)) return false;
    // Palette 1 must have eight tiles of 16 rows of 64 bytes.
    if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d) || (b & 0xffff) < 64 || (b >> 16) < 8 || (c & 0xffff) < 16) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & SAVED) == SAVED && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#endif

#if defined(PJ_HAS_AVX_VNNI)
// Compilers that know the instructions do not all know their name in __builtin_cpu_supports.
bool has_avx_vnni() {
#if defined(PJ_EMULATE_AVX_VNNI)
    return true;
#else
    constexpr unsigned AVX_VNNI = 1u << 4;
    unsigned leaves, a, b, c, d;
    return __get_cpuid_count(7, 0, &leaves, &b, &c, &d) && leaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) &&
           (a & AVX_VNNI);
#endif
}
#endif

// The compiler's run-time checks include the operating system's saving of wide registers (XGETBV).
bool runs(const char* name) {
    if (!strcmp(name, "scalar")) return true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (!strcmp(name, "avx2")) return avx2;
#if defined(PJ_HAS_AVX_VNNI)
    if (!strcmp(name, "avx_vnni")) return avx2 && has_avx_vnni();
#endif
    if (!strcmp(name, "avx512_vnni")) {
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni");
    }
#if defined(PJ_HAS_BF16)
    if (!strcmp(name, "avx512_bf16")) return runs("avx512_vnni") && __builtin_cpu_supports("avx512bf16");
#endif
#if defined(PJ_HAS_AMX)
    if (!strcmp(name, "amx")) return runs("avx512_vnni") && amx_permitted();
#endif
#endif
    return false;
}

const Ops* table(const char* name) {
    if (!strcmp(name, "scalar")) return &scalar_ops();
#if defined(__x86_64__)
    if (!strcmp(name, "avx2")) return &avx2_ops();
#if defined(PJ_HAS_AVX_VNNI)
    if (!strcmp(name, "avx_vnni")) return &avx_vnni_ops();
#endif
    if (!strcmp(name, "avx512_vnni")) return &avx512_ops();
#if defined(PJ_HAS_BF16)
    if (!strcmp(name, "avx512_bf16")) return &bf16_ops();
#endif
#if defined(PJ_HAS_AMX)
    if (!strcmp(name, "amx")) return &amx_ops();
#endif
#endif
    return nullptr;
}

bool known(const char* name) {
    for (const char* other : {"amx", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx2", "scalar"})
        if (!strcmp(name, other)) return true;
    return false;
}

const Ops* best() {
    for (const char* name : {"amx", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx2"})
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
    if (!known(name)) return -1;
    if (!runs(name)) return -2;
    chosen.store(table(name), std::memory_order_release);
    return 0;
}

}  // namespace penjing
