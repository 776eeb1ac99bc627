// Memory in huge pages, for tables that are looked up all over.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <new>

namespace blink {

// With small pages nearly every lookup in a table of megabytes walks the page tables, and in a
// virtual machine those of its host for each of their levels: there huge pages make encoding up to
// five times as fast.
class HugePages final : public std::pmr::memory_resource {
 public:
  // The size of a huge page of x86-64, and of aarch64 with pages of 4 KiB.
  static constexpr std::size_t kPageBytes = std::size_t{2} << 20;

  static HugePages& instance() {
    static HugePages pages;
    return pages;
  }

 private:
  HugePages() = default;

  static constexpr std::size_t rounded(std::size_t n) {
    return (n + kPageBytes - 1) / kPageBytes * kPageBytes;
  }

  void* do_allocate(std::size_t num_bytes, std::size_t alignment) override {
    if (alignment > kPageBytes || num_bytes > SIZE_MAX / 2) throw std::bad_alloc();
    const std::size_t whole = rounded(num_bytes);
    const std::size_t mapped = whole + kPageBytes;
    void* const p =
        mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    // What lies before the first and behind the last whole huge page goes back.
    const auto address = reinterpret_cast<uintptr_t>(p);
    const std::size_t before = rounded(address) - address;
    auto* const begin = static_cast<std::byte*>(p) + before;
    if (before > 0) munmap(p, before);
    if (mapped - before > whole) munmap(begin + whole, mapped - before - whole);
    // A kernel without huge pages refuses: the memory is the same, only slower.
    madvise(begin, whole, MADV_HUGEPAGE);
    return begin;
  }

  void do_deallocate(void* p, std::size_t num_bytes, std::size_t) override {
    munmap(p, rounded(num_bytes));
  }

  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

}  // namespace blink
