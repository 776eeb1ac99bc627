// What rendered row kernels are made of besides plain loops: reductions, ranking. Row by row, in a
// fixed order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "blink/cpu/math.hpp"

namespace blink::cpu {

// Sum in 16 lanes: lane i % 16 takes element i of each line, lanes are added pairwise at the end.
class SumLanes {
 public:
  template <typename Element>
  void add(int32_t count, Element&& element) {
    int32_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int32_t lane = 0; lane < kLanes; ++lane) lanes_[lane] += element(i + lane);
    }
    const int32_t rest = count - i;
    for (int32_t lane = 0; lane < kLanes && lane < rest; ++lane) lanes_[lane] += element(i + lane);
  }

  float result() {
    for (int32_t width = kLanes / 2; width > 0; width /= 2) {
      for (int32_t lane = 0; lane < width; ++lane) lanes_[lane] += lanes_[lane + width];
    }
    return lanes_[0];
  }

 private:
  static constexpr int32_t kLanes = 16;
  alignas(64) float lanes_[kLanes] = {};
};

// Any other reduction, one element after the other.
template <typename T, typename Combine>
class Fold {
 public:
  Fold(T start, Combine combine) : value_(start), combine_(combine) {}

  template <typename Element>
  void add(int32_t count, Element&& element) {
    for (int32_t i = 0; i < count; ++i) value_ = combine_(value_, static_cast<T>(element(i)));
  }

  T result() const { return value_; }

 private:
  T value_;
  Combine combine_;
};

// Largest first, lowest index first among equals; a NaN counts as largest. Writes (rank, value,
// index).
template <int32_t kCount, typename T, typename Element, typename Write>
void top_k(int32_t length, Element&& element, Write&& write) {
  T values[kCount];
  int32_t indices[kCount];
  int32_t filled = 0;
  auto beats = [](T a, T b) { return a > b || (a != a && b == b); };
  for (int32_t i = 0; i < length; ++i) {
    const T value = element(i);
    if (filled == kCount && !beats(value, values[kCount - 1])) continue;
    int32_t at = filled < kCount ? filled++ : kCount - 1;
    for (; at > 0 && beats(value, values[at - 1]); --at) {
      values[at] = values[at - 1];
      indices[at] = indices[at - 1];
    }
    values[at] = value;
    indices[at] = i;
  }
  for (int32_t rank = 0; rank < kCount; ++rank) write(rank, values[rank], indices[rank]);
}

}  // namespace blink::cpu
