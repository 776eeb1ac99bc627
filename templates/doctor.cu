// The device launch self-test of `blink-runtime doctor`.
#include <cuda_device_runtime_api.h>

struct LaunchTest {
  unsigned int runs;
  unsigned int target;
  unsigned int error;  // cudaError_t of the first launch that failed
};

// A graph of this one node relaunches itself behind its own end.
extern "C" __global__ void relaunch_self(LaunchTest* test) {
  if (++test->runs >= test->target || test->error != 0) return;
  test->error = cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
}

extern "C" __global__ void count_run(LaunchTest* test) { atomicAdd(&test->runs, 1u); }

// Launches graph `child` beside itself `test->target` times: one graph may do so 120 times.
extern "C" __global__ void launch_window(LaunchTest* test, cudaGraphExec_t* children, int num_children) {
  for (unsigned int i = 0; i < test->target && test->error == 0; ++i) {
    const unsigned int before = *(volatile unsigned int*)&test->runs;
    test->error = cudaGraphLaunch(children[i % num_children], cudaStreamGraphFireAndForget);
    for (int waited = 0; waited < 1000000 && *(volatile unsigned int*)&test->runs == before; ++waited)
      __nanosleep(100);
  }
}
