#include "memory.h"

#include <sys/mman.h>

namespace penjing {
namespace {
constexpr size_t HUGE_PAGE = size_t{2} << 20;
// Less would fill a huge page with zeros, and take it, for a few small pages, which stream as well.
constexpr size_t LEAST_ON_HUGE = size_t{128} << 10;
size_t whole_pages(size_t bytes) { return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }
}  // namespace

void* allocate_pages(size_t bytes) {
    if (bytes == 0 || bytes > SIZE_MAX - 2 * HUGE_PAGE) return nullptr;
    // One page more, cut off again on both sides, gives the alignment.
    const size_t wanted = whole_pages(bytes);
    void* raw = mmap(nullptr, wanted + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    const uintptr_t start = reinterpret_cast<uintptr_t>(raw), aligned = whole_pages(start);
    if (aligned > start) munmap(raw, aligned - start);
    const uintptr_t end = aligned + wanted, raw_end = start + wanted + HUGE_PAGE;
    if (raw_end > end) munmap(reinterpret_cast<void*>(end), raw_end - end);
#ifdef MADV_HUGEPAGE
    // A request: where the system refuses, small pages serve (a third slower to stream).
    if (bytes >= LEAST_ON_HUGE) madvise(reinterpret_cast<void*>(aligned), wanted, MADV_HUGEPAGE);
#endif
    return reinterpret_cast<void*>(aligned);
}

void free_pages(void* memory, size_t bytes) {
    if (memory != nullptr) munmap(memory, whole_pages(bytes));
}

void* Scratch::reserve(size_t bytes) {
    if (bytes > bytes_) {
        free_pages(memory_, bytes_);
        const size_t grown = bytes > bytes_ * 2 ? bytes : bytes_ * 2;
        memory_ = allocate_pages(grown);
        bytes_ = memory_ ? grown : 0;
    }
    return memory_;
}

}  // namespace penjing
