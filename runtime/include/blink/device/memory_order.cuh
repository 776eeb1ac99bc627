// Loads and stores of words that another processor reads or writes: the GPU, the host, or a NIC.
//
// All are at system scope. An acquire load pairs with the release store of the same word (abi.h
// names the pairs): whatever the writer stored before it is seen after it. Relaxed accesses are
// single, untorn and never served from a stale L1 line; they order nothing.
#ifndef BLINK_DEVICE_MEMORY_ORDER_CUH
#define BLINK_DEVICE_MEMORY_ORDER_CUH

#include "blink/device/platform.cuh"

namespace blink {

BLINK_FUNCTION uint64_t load_acquire(const uint64_t* word) {
#if defined(__CUDA_ARCH__)
  uint64_t value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

BLINK_FUNCTION uint32_t load_acquire(const uint32_t* word) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

BLINK_FUNCTION uint64_t load_relaxed(const uint64_t* word) {
#if defined(__CUDA_ARCH__)
  uint64_t value;
  asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

BLINK_FUNCTION uint32_t load_relaxed(const uint32_t* word) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

BLINK_FUNCTION void store_release(uint64_t* word, uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

BLINK_FUNCTION void store_release(uint32_t* word, uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

BLINK_FUNCTION void store_relaxed(uint64_t* word, uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

BLINK_FUNCTION void store_relaxed(uint32_t* word, uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

BLINK_FUNCTION void store_relaxed(float* word, float value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.f32 [%0], %1;" ::"l"(word), "f"(value) : "memory");
#else
  __atomic_store(word, &value, __ATOMIC_RELAXED);
#endif
}

}  // namespace blink

#endif  // BLINK_DEVICE_MEMORY_ORDER_CUH
