// The scheduler of one compiled model for sm_90a. Rendered by blinkc 0.1.0 from
// scheduler.cu.jinja; do not edit.
#include "blink/device/launch.cuh"
#include "blink/device/launch_test.cuh"
#include "config.cuh"
#include "graph_table.cuh"

namespace {

// Makes the calling block a team.
__device__ blink::BlockThreads block_team() {
  __shared__ uint64_t scratch[blink::BlockThreads::kScratchWords];
  return blink::BlockThreads{scratch};
}

// What every step touches stays in shared memory while a kernel runs.
__device__ blink::HotMemory hot_memory() {
  constexpr uint64_t kBytes = blink::hot_memory_bytes(blink::kMaxBatch);
  __shared__ uint64_t words[kBytes / 8];
  return blink::HotMemory{words, kBytes,
                          blink::carve_device_scheduler(nullptr, blink::kNumGraphKeys)};
}

}  // namespace

// Bytes that the loader allocates for `state`.
extern "C" __device__ const uint64_t blink_scheduler_state_bytes = blink::device_scheduler_bytes(
    blink::kNumGraphKeys, blink::kNumSlots, blink::kMaxBatch, blink::kNumKvPages);

// Once, before any other kernel. `execs`: see templates/README.md. `error` gets an InitializeError.
extern "C" __global__ void __launch_bounds__(blink::kTeamThreads)
    blink_scheduler_init(void* state, uint64_t state_bytes, void* ring, uint64_t ring_bytes,
                         blink_step_buffers buffers, const uint64_t* execs,
                         blink::HostMailbox* mailbox, uint32_t* error) {
  blink::BlockThreads team = block_team();
  blink::initialize_device_scheduler(state, state_bytes, team, ring, ring_bytes, buffers,
                                     blink::graph_table(), blink::kMaxPrefillTokens, execs, mailbox,
                                     error);
}

// chained: the last node of every captured graph.
extern "C" __global__ void __launch_bounds__(blink::kTeamThreads)
    blink_scheduler_step(void* state) {
  blink::BlockThreads team = block_team();
  blink::run_chained_step(state, hot_memory(), team);
}

// chained: the idle graph's one node.
extern "C" __global__ void __launch_bounds__(blink::kTeamThreads)
    blink_scheduler_idle(void* state) {
  blink::BlockThreads team = block_team();
  blink::run_chained_idle(state, hot_memory(), team);
}

// persistent: the one node of its own graph.
extern "C" __global__ void __launch_bounds__(blink::kTeamThreads)
    blink_scheduler_persistent(void* state) {
  blink::BlockThreads team = block_team();
  blink::run_persistent(state, hot_memory(), team, blink::kRelaunchWindow);
}

// host: commits and fills; the host launches the graph that the mailbox names.
extern "C" __global__ void __launch_bounds__(blink::kTeamThreads)
    blink_scheduler_host_step(void* state, uint32_t launch_error) {
  blink::BlockThreads team = block_team();
  blink::run_host_step(state, hot_memory(), team, launch_error);
}

// The device launch self-test, which the loader runs first.
extern "C" __global__ void blink_test_relaunch(blink::LaunchTest* test) {
  blink::relaunch_self(test);
}

extern "C" __global__ void blink_test_count(blink::LaunchTest* test) { blink::count_run(test); }

extern "C" __global__ void blink_test_window(blink::LaunchTest* test, const uint64_t* children) {
  blink::launch_window(test, children);
}
