// Memory that streams well: aligned to 2 MiB and backed by huge pages where the system grants them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace penjing {

// Zeroed; null when there is no memory. Freed by `free_pages` with the same size.
void* allocate_pages(size_t bytes);
void free_pages(void* memory, size_t bytes);

// Grow-only scratch, 64-byte aligned; contents are lost when it grows.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { free_pages(memory_, bytes_); }
    // Null when there is no memory.
    void* reserve(size_t bytes);

private:
    void* memory_ = nullptr;
    size_t bytes_ = 0;
};

// Hands out aligned pieces of a block; with a null block it only counts.
class Carver {
public:
    explicit Carver(void* block) : block_(reinterpret_cast<uintptr_t>(block)) {}
    template <typename T>
    T* take(size_t count) {
        T* piece = reinterpret_cast<T*>(block_ + used_);
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
    size_t used() const { return used_; }

private:
    uintptr_t block_;
    size_t used_ = 0;
};

}  // namespace penjing
