// What nvcc and NVRTC know without a header, on the emulated device; included before the kernels.
#ifndef EMULATION_CUDA_H
#define EMULATION_CUDA_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "emulation/device.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(x, y, z)
// A module's thread-local memory is one piece, which the emulation exchanges between the blocks of
// a cluster: where each variable lies in it is equal for all, as in a GPU's shared memory.
#define __shared__ thread_local

// Kernels declare dynamic shared memory under names of their own; all of them are one.
namespace blink::kernels {
extern thread_local unsigned char shared[] asm("emulated_shared");
extern thread_local unsigned char held[] asm("emulated_shared");
}  // namespace blink::kernels
extern "C" {
extern thread_local unsigned char shared[] asm("emulated_shared");
}

#define threadIdx (emulation::running->index)
#define blockIdx (emulation::running->warp->block->index)
#define blockDim (emulation::block_size)
#define gridDim (emulation::grid_size)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <typename N>
constexpr N min(N a, N b) {
  return b < a ? b : a;
}
template <typename N>
constexpr N max(N a, N b) {
  return a < b ? b : a;
}

template <typename To, typename From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline float __int_as_float(int32_t x) { return bits_as<float>(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<uint32_t>(both >> (select >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

template <typename N>
N __ldcg(const N* p) {
  emulation::check_global(p, sizeof(N), "__ldcg");
  return *p;
}
template <typename N>
void __stcg(N* p, N x) {
  emulation::check_global(p, sizeof(N), "__stcg");
  *p = x;
}
template <typename N>
N atomicAdd(N* p, N x) {
  const N old = *p;
  *p = old + x;
  return old;
}
template <typename N>
N atomicOr(N* p, N x) {
  const N old = *p;
  *p = old | x;
  return old;
}
inline void __threadfence() {}

inline void __syncthreads() { emulation::block_barrier(); }

// Operations of a warp, which all of its lanes join.
template <typename Argument>
void join_warp(const char* name, uint32_t mask, void (*operation)(void* const*),
               Argument& argument) {
  if (mask != 0xffffffffu) emulation::fail("%s of a part of the warp is not emulated", name);
  emulation::warp_operation(name, operation, &argument);
}
inline void __syncwarp() {
  int nothing = 0;
  join_warp("__syncwarp", 0xffffffffu, [](void* const*) {}, nothing);
}

template <typename N>
struct Exchange {
  N value;
  int from;  // lane whose value this one gets
  N result;
};
template <typename N>
N exchange(const char* name, uint32_t mask, N value, int from) {
  Exchange<N> mine{value, from, value};
  join_warp(
      name, mask,
      [](void* const* lanes) {
        for (int i = 0; i < 32; ++i) {
          Exchange<N>& one = *static_cast<Exchange<N>*>(lanes[i]);
          one.result = static_cast<Exchange<N>*>(lanes[one.from])->value;
        }
      },
      mine);
  return mine.result;
}
inline int own_lane() { return static_cast<int>(emulation::running->lane); }
template <typename N>
N __shfl_xor_sync(uint32_t mask, N value, int other) {
  return exchange("__shfl_xor_sync", mask, value, own_lane() ^ other);
}
template <typename N>
N __shfl_up_sync(uint32_t mask, N value, int distance) {
  const int from = own_lane() - distance;
  return exchange("__shfl_up_sync", mask, value, from < 0 ? own_lane() : from);
}
template <typename N>
N __shfl_sync(uint32_t mask, N value, int from) {
  return exchange("__shfl_sync", mask, value, from & 31);
}

template <typename N, typename Combine>
N reduce(const char* name, uint32_t mask, N value) {
  join_warp(
      name, mask,
      [](void* const* lanes) {
        N result = *static_cast<N*>(lanes[0]);
        for (int i = 1; i < 32; ++i) result = Combine::apply(result, *static_cast<N*>(lanes[i]));
        for (int i = 0; i < 32; ++i) *static_cast<N*>(lanes[i]) = result;
      },
      value);
  return value;
}
struct CombineAdd {
  template <typename N>
  static N apply(N a, N b) {
    return a + b;
  }
};
struct CombineMin {
  template <typename N>
  static N apply(N a, N b) {
    return min(a, b);
  }
};
struct CombineMax {
  template <typename N>
  static N apply(N a, N b) {
    return max(a, b);
  }
};
struct CombineOr {
  static int apply(int a, int b) { return a | b; }
};
template <typename N>
N __reduce_add_sync(uint32_t mask, N x) {
  return reduce<N, CombineAdd>("__reduce_add_sync", mask, x);
}
template <typename N>
N __reduce_min_sync(uint32_t mask, N x) {
  return reduce<N, CombineMin>("__reduce_min_sync", mask, x);
}
template <typename N>
N __reduce_max_sync(uint32_t mask, N x) {
  return reduce<N, CombineMax>("__reduce_max_sync", mask, x);
}
inline int __any_sync(uint32_t mask, int x) {
  return reduce<int, CombineOr>("__any_sync", mask, x != 0);
}

// The table of a module's kernels, made from their declarations (module.py).
template <auto kFunction>
struct CallOf;
template <typename... Parameters, void (*kFunction)(Parameters...)>
struct CallOf<kFunction> {
  static void call(void* const* arguments) {
    call_with(arguments, Places<sizeof...(Parameters)>());
  }

 private:
  template <size_t... kPlaces>
  struct PlaceList {};
  template <size_t kCount, size_t... kPlaces>
  struct MakePlaces : MakePlaces<kCount - 1, kCount - 1, kPlaces...> {};
  template <size_t... kPlaces>
  struct MakePlaces<0, kPlaces...> {
    using Type = PlaceList<kPlaces...>;
  };
  template <size_t kCount>
  using Places = typename MakePlaces<kCount>::Type;
  template <size_t... kPlaces>
  static void call_with(void* const* arguments, PlaceList<kPlaces...>) {
    kFunction(*static_cast<Parameters*>(arguments[kPlaces])...);
  }
};
template <auto kFunction>
constexpr emulation::Kernel kernel_entry(const char* name, uint32_t cluster,
                                         uint32_t most_threads = 0) {
  return {name, CallOf<kFunction>::call, cluster == 0 ? 1 : cluster, most_threads};
}

#endif  // EMULATION_CUDA_H
