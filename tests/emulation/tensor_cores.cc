// Half-precision numbers, asynchronous copies and matrix products of the emulated device.
//
// Asynchronous work is done at once or as late as the rules allow, drawn from the seed: a wait or a
// barrier that is missing shows in one of both. Products add in single precision, in order of k;
// real tensor cores round otherwise.
#include <algorithm>
#include <cstring>

#include "emulation/device.h"

namespace emulation {

namespace {

constexpr int kMaxColumns = 256;

struct HalfTable {
  float value[65536];
  HalfTable() {
    for (uint32_t i = 0; i < 65536; ++i) {
      const uint32_t sign = (i & 0x8000u) << 16, exponent = i >> 10 & 31, fraction = i & 1023;
      uint32_t bits = sign;
      if (exponent == 31) {
        bits |= 0x7f800000u | fraction << 13;
      } else if (exponent != 0) {
        bits |= (exponent + 112) << 23 | fraction << 13;
      } else {
        const float small = static_cast<float>(fraction) * (1.0f / 16777216.0f);
        uint32_t small_bits;
        memcpy(&small_bits, &small, 4);
        bits |= small_bits;
      }
      memcpy(&value[i], &bits, 4);
    }
  }
};
const HalfTable half_table;

float float_of_bf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  memcpy(&x, &wide, 4);
  return x;
}

float decode(uint16_t bits, bool is_bf16) {
  return is_bf16 ? float_of_bf16(bits) : half_table.value[bits];
}

// sum[i][j] += sum over k of left[i][k] right[k][j], k ascending.
template <int kRows>
void multiply_matrices(float* sum, const float (&left)[16][16], const float* right, int columns) {
  for (int i = 0; i < kRows; ++i) {
    float* row = sum + i * columns;
    for (int k = 0; k < 16; ++k) {
      const float x = left[i][k];
      const float* from = right + k * columns;
      for (int j = 0; j < columns; ++j) row[j] += x * from[j];
    }
  }
}

// The left operand as its lanes hold it.
void decode_left(float (&left)[16][16], const uint32_t words[32][4], bool is_bf16) {
  for (int lane = 0; lane < 32; ++lane)
    for (int r = 0; r < 4; ++r) {
      const int row = lane / 4 + (r & 1) * 8, k = lane % 4 * 2 + (r >> 1) * 8;
      left[row][k] = decode(static_cast<uint16_t>(words[lane][r]), is_bf16);
      left[row][k + 1] = decode(static_cast<uint16_t>(words[lane][r] >> 16), is_bf16);
    }
}

// A descriptor's matrix: 128-byte swizzle, the one layout that kernels use.
struct Descriptor {
  uint32_t start, leading, stride;  // bytes

  explicit Descriptor(uint64_t bits) {
    start = static_cast<uint32_t>(bits & 0x3fff) << 4;
    leading = static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4;
    stride = static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4;
    if (bits >> 62 != 1) fail("a product's descriptor without the 128-byte swizzle");
    if ((bits >> 49 & 7) != 0) fail("a product's descriptor with a base offset");
  }
};

// The 16 bytes at an address before the swizzle, shown to products.
const char* operand(uint32_t address) {
  const uint32_t swizzled = address ^ (address >> 7 & 7) << 4;
  const char* p = shared_memory(swizzled, 16, "a warpgroup product");
  const Block& block = *running->warp->block;
  if (block.is_unshown[swizzled / 16])
    fail("a warpgroup product reads shared address %u before it was shown to products", swizzled);
  return p;
}

// Rows hold consecutive k: groups of 8 rows are `stride` apart.
void read_k_major(const Descriptor& d, int row, uint16_t (&values)[16]) {
  const uint32_t at = d.start + row / 8 * d.stride + row % 8 * 128;
  for (int half = 0; half < 2; ++half) memcpy(values + half * 8, operand(at + half * 16), 16);
}

void decode_right(float* right, const Product& p) {
  const Descriptor d(p.b);
  if (!p.right_is_row_major) {
    for (int n = 0; n < p.columns; ++n) {
      uint16_t values[16];
      read_k_major(d, n, values);
      for (int k = 0; k < 16; ++k) right[k * p.columns + n] = decode(values[k], p.is_bf16);
    }
    return;
  }
  // Rows are k: 64 columns a row, panels of them `leading` apart, groups of 8 rows `stride`.
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < p.columns; n += 8) {
      uint16_t values[8];
      memcpy(values,
             operand(d.start + n / 64 * d.leading + k / 8 * d.stride + k % 8 * 128 + n % 64 * 2),
             16);
      for (int j = 0; j < 8; ++j) right[k * p.columns + n + j] = decode(values[j], p.is_bf16);
    }
}

void run_product(const Product& p, int warp_of_group) {
  static float left[16][16], right[16 * kMaxColumns], sum[16 * kMaxColumns];
  if (p.a_in_registers) {
    decode_left(left, p.left, p.is_bf16);
  } else {
    const Descriptor d(p.a);
    for (int row = 0; row < 16; ++row) {
      uint16_t values[16];
      read_k_major(d, warp_of_group * 16 + row, values);
      for (int k = 0; k < 16; ++k) left[row][k] = decode(values[k], p.is_bf16);
    }
  }
  decode_right(right, p);
  auto place = [&](int lane, int i) {
    return (lane / 4 + (i >> 1 & 1) * 8) * p.columns + i / 4 * 8 + lane % 4 * 2 + (i & 1);
  };
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < p.columns / 2; ++i) sum[place(lane, i)] = p.keep ? p.sums[lane][i] : 0.0f;
  multiply_matrices<16>(sum, left, right, p.columns);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < p.columns / 2; ++i) p.sums[lane][i] = sum[place(lane, i)];
}

int warp_of_group() {
  return static_cast<int>(running->warp - running->warp->block->warps.data()) % 4;
}

void do_copy(Copy& copy) {
  if (copy.done) return;
  char* to = shared_memory(copy.to, copy.bytes, "cp.async");
  if (copy.keep)
    memcpy(to, copy.from, copy.bytes);
  else
    memset(to, 0, copy.bytes);
  copy.done = true;
}

template <typename F>
void for_warp(const char* name, F operation, void* argument) {
  warp_operation(name, operation, argument);
}

}  // namespace

float float_of_half(uint16_t bits) { return half_table.value[bits]; }

uint16_t bf16_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t half_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = bits >> 16 & 0x8000;
  if (x != x) return 0x7fff;
  const float size = x < 0 ? -x : x;
  if (size >= 65520.0f) return sign | 0x7c00;
  if (size < 6.103515625e-05f) {  // subnormal: units of 2^-24, rounded by the addition
    const float shifted = size + 0.5f;
    uint32_t shifted_bits;
    memcpy(&shifted_bits, &shifted, 4);
    return static_cast<uint16_t>(sign | (shifted_bits - 0x3f000000u));
  }
  const uint32_t rounded = (bits & 0x7fffffffu) + 0xfff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
}

void multiply(float* const sums[32], const uint32_t words[32][4], const uint32_t right_words[32][2],
              int rows, bool is_bf16) {
  float left[16][16], right[16 * 8], sum[16 * 8];
  decode_left(left, words, is_bf16);
  for (int lane = 0; lane < 32; ++lane)
    for (int r = 0; r < 2; ++r) {
      const int k = r * 8 + lane % 4 * 2, n = lane / 4;
      right[k * 8 + n] = decode(static_cast<uint16_t>(right_words[lane][r]), is_bf16);
      right[k * 8 + 8 + n] = decode(static_cast<uint16_t>(right_words[lane][r] >> 16), is_bf16);
    }
  auto place = [](int lane, int i) {
    return (lane / 4 + (i >> 1) * 8) * 8 + lane % 4 * 2 + (i & 1);
  };
  const int count = rows / 4;
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < count; ++i) sum[place(lane, i)] = sums[lane][i];
  if (rows == 16)
    multiply_matrices<16>(sum, left, right, 8);
  else
    multiply_matrices<8>(sum, left, right, 8);
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < count; ++i) sums[lane][i] = sum[place(lane, i)];
}

void copy_async(uint32_t to, const void* from, uint32_t bytes, bool keep) {
  shared_memory(to, bytes, "cp.async");
  if (keep) check_global(from, bytes, "cp.async");
  if (reinterpret_cast<uint64_t>(from) % bytes != 0)
    fail("cp.async from %p, not on a boundary of %u bytes", from, bytes);
  running->copies.push_back({to, from, bytes, keep, false});
  // Until it is waited for nobody may read the place.
  running->warp->block->is_unshown[to / 16] = 1;
  if (flip()) do_copy(running->copies.back());
}

void copy_async_commit() { running->copy_groups.push_back(running->copies.size()); }

void copy_async_wait(size_t pending) {
  Thread& me = *running;
  if (me.copy_groups.size() <= pending) return;
  const size_t groups = me.copy_groups.size() - pending, count = me.copy_groups[groups - 1];
  for (size_t i = 0; i < count; ++i) {
    do_copy(me.copies[i]);
    me.unshown.push_back(me.copies[i].to / 16);
  }
  me.copies.erase(me.copies.begin(), me.copies.begin() + count);
  me.copy_groups.erase(me.copy_groups.begin(), me.copy_groups.begin() + groups);
  for (size_t& end : me.copy_groups) end -= count;
}

void show_to_products() {
  for (uint32_t piece : running->unshown) running->warp->block->is_unshown[piece] = 0;
  running->unshown.clear();
}

void products_begin() {
  for_warp("wgmma.fence", [](void* const*) { running->warp->has_fence = true; }, nullptr);
}

void product(ProductArguments& arguments) {
  for_warp(
      "wgmma.mma_async",
      [](void* const* lanes) {
        Warp& warp = *running->warp;
        if (!warp.has_fence) fail("a warpgroup product without wgmma.fence before it");
        const ProductArguments& first = *static_cast<ProductArguments*>(lanes[0]);
        Product p;
        p.a = first.a, p.b = first.b;
        p.a_in_registers = first.left != nullptr;
        p.right_is_row_major = first.right_is_row_major;
        p.keep = first.keep, p.is_bf16 = first.is_bf16, p.columns = first.columns;
        for (int i = 0; i < 32; ++i) {
          const ProductArguments& one = *static_cast<ProductArguments*>(lanes[i]);
          if (one.a != p.a || one.b != p.b || one.keep != p.keep)
            fail("lanes of a warp ask for different warpgroup products");
          p.sums[i] = one.sums;
          if (one.left != nullptr) memcpy(p.left[i], one.left, sizeof p.left[i]);
        }
        ++warp.num_products;
        if (warp.products.empty() && flip())
          run_product(p, warp_of_group());
        else
          warp.products.push_back(p);
      },
      &arguments);
}

void products_commit() {
  for_warp(
      "wgmma.commit_group",
      [](void* const*) { running->warp->product_groups.push_back(running->warp->products.size()); },
      nullptr);
}

void products_wait(size_t pending) {
  for_warp(
      "wgmma.wait_group",
      [](void* const* lanes) {
        Warp& warp = *running->warp;
        warp.has_fence = false;
        const size_t pending = *static_cast<const size_t*>(lanes[0]);
        if (warp.product_groups.size() <= pending) return;
        const size_t groups = warp.product_groups.size() - pending;
        const size_t count = warp.product_groups[groups - 1];
        for (size_t i = 0; i < count; ++i) run_product(warp.products[i], warp_of_group());
        warp.products.erase(warp.products.begin(), warp.products.begin() + count);
        warp.product_groups.erase(warp.product_groups.begin(),
                                  warp.product_groups.begin() + groups);
        for (size_t& end : warp.product_groups) end -= count;
      },
      &pending);
}

}  // namespace emulation
