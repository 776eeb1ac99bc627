// What the policy needs of the machine below it: function attributes and a team of cooperating
// threads.
//
// Every policy function is compiled twice from the same text: for the GPU, where one block runs it,
// and for the host, where one thread does. A `Team` has: id(), count(), sync(), append(),
// exclusive_sum(), raise(). Functions that take a team are called by all of its threads with equal
// arguments.
#ifndef BLINK_DEVICE_PLATFORM_CUH
#define BLINK_DEVICE_PLATFORM_CUH

#include <stdint.h>

#if defined(__CUDACC__)
#define BLINK_FUNCTION __host__ __device__ inline
// For what is called from several places but seldom: one copy keeps the kernels small.
#define BLINK_RARE_FUNCTION __host__ __device__ __noinline__
#else
#define BLINK_FUNCTION inline
#define BLINK_RARE_FUNCTION inline
#endif

namespace blink {

// The team of the CPU target: one thread, so nothing needs to wait.
struct SingleThread {
  BLINK_FUNCTION uint32_t id() const { return 0; }
  BLINK_FUNCTION uint32_t count() const { return 1; }
  BLINK_FUNCTION bool is_leader() const { return true; }
  // Barrier: what any thread wrote before is seen by all after it.
  BLINK_FUNCTION void sync() const {}
  // Adds one to a counter shared by the team; returns the value before.
  BLINK_FUNCTION uint32_t append(uint32_t* counter) const { return (*counter)++; }
  // Returns the sum of `value` over the threads before this one; `total` gets the sum over all.
  BLINK_FUNCTION uint64_t exclusive_sum(uint64_t value, uint64_t* total) const {
    *total = value;
    return 0;
  }
  // Sets a word shared by the team to the largest of its value and the threads' values.
  BLINK_FUNCTION void raise(uint32_t* word, uint32_t value) const {
    if (value > *word) *word = value;
  }
};

#if defined(__CUDACC__)

// The team of the GPU: one block of whole warps, at most 1024 threads.
struct BlockThreads {
  uint64_t* scratch;  // shared memory, kScratchWords words

  static constexpr uint32_t kScratchWords = 33;

  __device__ uint32_t id() const { return threadIdx.x; }
  __device__ uint32_t count() const { return blockDim.x; }
  __device__ bool is_leader() const { return threadIdx.x == 0; }
  __device__ void sync() const { __syncthreads(); }
  __device__ uint32_t append(uint32_t* counter) const { return atomicAdd(counter, 1u); }

  __device__ uint64_t exclusive_sum(uint64_t value, uint64_t* total) const {
    const uint32_t lane = threadIdx.x & 31u;
    const uint32_t warp = threadIdx.x >> 5;
    const uint32_t num_warps = blockDim.x >> 5;
    uint64_t inclusive = value;
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      const uint64_t left = __shfl_up_sync(0xFFFFFFFFu, inclusive, distance);
      if (lane >= distance) inclusive += left;
    }
    __syncthreads();  // the scratch of an earlier call has been read
    if (lane == 31) scratch[warp] = inclusive;
    __syncthreads();
    uint64_t before = 0;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < num_warps; ++i) {
      if (i == warp) before = sum;
      sum += scratch[i];
    }
    *total = sum;
    return before + inclusive - value;
  }

  // The leader's value, for all threads.
  __device__ uint64_t broadcast(uint64_t value) const {
    __syncthreads();  // the scratch of an earlier call has been read
    if (threadIdx.x == 0) scratch[0] = value;
    __syncthreads();
    return scratch[0];
  }

  __device__ void raise(uint32_t* word, uint32_t value) const {
    if (value > 0) atomicMax(word, value);
  }
};

// Nanoseconds of the GPU's global timer.
__device__ inline uint64_t global_time_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// The leader's clock, equal for all threads of the team.
__device__ inline uint64_t leader_time_ns(const BlockThreads& team) {
  return team.broadcast(team.is_leader() ? global_time_ns() : 0);
}

#endif  // __CUDACC__

template <typename Number>
BLINK_FUNCTION Number smaller(Number a, Number b) {
  return b < a ? b : a;
}

template <typename Number>
BLINK_FUNCTION Number larger(Number a, Number b) {
  return a < b ? b : a;
}

}  // namespace blink

#endif  // BLINK_DEVICE_PLATFORM_CUH
