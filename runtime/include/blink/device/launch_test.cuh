// The device launch self-test: graphs of one kernel that launch graphs. GPU only.
//
// A loader runs it before it trusts a placement that launches graphs from the GPU, and
// `blink-runtime doctor` prints what came out: a driver where launches do nothing must not serve.
#ifndef BLINK_DEVICE_LAUNCH_TEST_CUH
#define BLINK_DEVICE_LAUNCH_TEST_CUH

#include <cuda_device_runtime_api.h>

#include "blink/device/platform.cuh"

namespace blink {

struct LaunchTest {
  uint32_t runs;    // of the kernels below; the host compares it with target
  uint32_t target;  // how often to launch
  uint32_t error;   // cudaError_t of the first launch that failed
  uint32_t reserved;
};

// A graph of this one node launches itself again behind its own end.
__device__ inline void relaunch_self(LaunchTest* test) {
  if (++test->runs >= test->target || test->error != 0) return;
  test->error =
      static_cast<uint32_t>(cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch));
}

__device__ inline void count_run(LaunchTest* test) { atomicAdd(&test->runs, 1u); }

// Launches the two graphs of count_run beside itself, in turns, each time after the last one ran:
// one execution of a graph may do so 120 times.
__device__ inline void launch_window(LaunchTest* test, const uint64_t* children) {
  constexpr uint32_t kMostPolls = 1000000;
  volatile uint32_t* runs = &test->runs;
  for (uint32_t i = 0; i < test->target && test->error == 0; ++i) {
    const uint32_t before = *runs;
    test->error = static_cast<uint32_t>(cudaGraphLaunch(
        reinterpret_cast<cudaGraphExec_t>(children[i % 2]), cudaStreamGraphFireAndForget));
    for (uint32_t polls = 0; polls < kMostPolls && *runs == before; ++polls) __nanosleep(100);
  }
}

}  // namespace blink

#endif  // BLINK_DEVICE_LAUNCH_TEST_CUH
