// A fixed-size array that starts on a cache line.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>

namespace blink {

inline constexpr std::size_t kLineBytes = 64;

template <typename T>
class AlignedArray {
 public:
  AlignedArray() = default;
  AlignedArray(std::size_t size, const T& value)
      : data_(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t{kLineBytes}))) {
    std::uninitialized_fill_n(data_.get(), size, value);
  }

  T& operator[](std::size_t i) { return data_.get()[i]; }
  const T& operator[](std::size_t i) const { return data_.get()[i]; }
  const T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t{kLineBytes}); }
  };

  std::unique_ptr<T, Free> data_;
};

}  // namespace blink
