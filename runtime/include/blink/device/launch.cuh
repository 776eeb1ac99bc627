// The three placements on the GPU: who calls schedule(), and how the chosen graph is launched. GPU
// only.
//
// chained: the last node of every graph runs the policy and tail-launches the next graph.
// persistent: one block loops; it launches graphs fire-and-forget and polls the completion word.
// host: one kernel per step; the host launches the graph that the mailbox names.
#ifndef BLINK_DEVICE_LAUNCH_CUH
#define BLINK_DEVICE_LAUNCH_CUH

#include <cuda_device_runtime_api.h>

#include "blink/device/initialize.cuh"
#include "blink/device/policy.cuh"

namespace blink {

// An idle graph polls for about a millisecond, then relaunches itself.
constexpr uint32_t kIdlePolls = 200;
constexpr uint32_t kIdlePauseNs = 4000;
// A graph that has not completed by then never will.
constexpr uint64_t kStepDeadlineNs = 60000000000u;

// In pinned host memory: what the host placement does next. Written by the GPU, turn last.
struct HostMailbox {
  uint64_t turn;    // of the last blink_scheduler_host_step; release, pairs with the host's acquire
  uint32_t action;  // SchedulerAction
  uint32_t action_key;  // key index of kActionLaunch
};

// Head of the device allocation; the Scheduler follows. Graph key k has execs[2k] and, for the
// persistent placement, execs[2k + 1], used in turns: an exec can be launched again only once it
// has retired.
struct DeviceScheduler {
  const uint64_t* execs;  // cudaGraphExec_t [2 * num_keys + 1]; the last one is the idle graph's
  HostMailbox* mailbox;
  uint8_t* exec_turns;  // [num_keys]
  uint64_t host_turn;
  uint32_t num_keys;
  uint32_t launch_result;  // cudaError_t of the leader's last launch, for the whole team
  Scheduler* scheduler;
};

// Bytes of the allocation; points `scheduler` into it unless that is null.
BLINK_FUNCTION constexpr uint64_t carve_device_scheduler(DeviceScheduler* device,
                                                         uint32_t num_keys) {
  Carver carver{reinterpret_cast<unsigned char*>(device), 0};
  carver.take<DeviceScheduler>(1);
  uint8_t* exec_turns = carver.take<uint8_t>(num_keys);
  if (device != nullptr) {
    device->exec_turns = exec_turns;
    device->scheduler = reinterpret_cast<Scheduler*>(carver.base + carver.offset_bytes);
  }
  return carver.offset_bytes;
}

BLINK_FUNCTION constexpr uint64_t device_scheduler_bytes(uint32_t num_keys, uint32_t num_slots,
                                                         uint32_t max_batch,
                                                         uint32_t num_kv_pages) {
  return carve_device_scheduler(nullptr, num_keys) +
         carve_scheduler(nullptr, num_slots, max_batch, num_kv_pages);
}

__device__ inline void initialize_device_scheduler(
    void* state, uint64_t state_bytes, BlockThreads& team, void* ring, uint64_t ring_bytes,
    const blink_step_buffers& buffers, const GraphTable& graphs, uint32_t max_prefill_tokens,
    const uint64_t* execs, HostMailbox* mailbox, uint32_t* error) {
  DeviceScheduler* device = static_cast<DeviceScheduler*>(state);
  const uint64_t head_bytes = carve_device_scheduler(nullptr, graphs.num_keys);
  uint32_t code = kInitializeStateTooSmall;
  if (state_bytes >= head_bytes) {
    code = initialize_scheduler(static_cast<unsigned char*>(state) + head_bytes,
                                state_bytes - head_bytes, team, ring, ring_bytes, buffers, graphs,
                                max_prefill_tokens);
  }
  if (team.is_leader()) {
    if (code == kInitializeOk) {
      *device = DeviceScheduler{};
      carve_device_scheduler(device, graphs.num_keys);
      device->execs = execs;
      device->mailbox = mailbox;
      device->num_keys = graphs.num_keys;
      for (uint32_t i = 0; i < graphs.num_keys; ++i) device->exec_turns[i] = 0;
    }
    *error = code;
  }
}

// Leader: launches an exec of the table, or with `execs` null the graph that is running. The inputs
// that all threads filled are ordered before it by the barrier and this fence.
__device__ inline uint32_t launch_exec(uint64_t exec, cudaStream_t mode) {
  __threadfence_system();
  return static_cast<uint32_t>(cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(exec), mode));
}

__device__ inline void note_launch_error(DeviceScheduler* device, uint32_t result) {
  if (result != 0) store_relaxed(&device->scheduler->header->launch_error, result);
}

// Tail-launches the graph of action_key, or the idle graph when there is nothing to run or the
// launch fails; its requests fail then and the idle graph goes on with the others. By the team.
__device__ inline void launch_next_chained(DeviceScheduler* device, BlockThreads& team) {
  Scheduler* s = device->scheduler;
  const uint64_t idle = device->execs[2 * device->num_keys];
  const uint32_t action = s->action;
  if (action == kActionStop) return;
  if (action == kActionLaunch) {
    if (team.is_leader()) {
      device->launch_result =
          launch_exec(device->execs[2 * s->action_key], cudaStreamGraphTailLaunch);
    }
    team.sync();
    if (device->launch_result == 0) return;
    fail_step(s, team, device->launch_result);
  }
  if (team.is_leader()) note_launch_error(device, launch_exec(idle, cudaStreamGraphTailLaunch));
}

__device__ inline void run_chained_step(void* state, BlockThreads& team) {
  DeviceScheduler* device = static_cast<DeviceScheduler*>(state);
  schedule(device->scheduler, team, leader_time_ns(team));
  launch_next_chained(device, team);
}

__device__ inline void run_chained_idle(void* state, BlockThreads& team) {
  DeviceScheduler* device = static_cast<DeviceScheduler*>(state);
  for (uint32_t i = 0; i < kIdlePolls; ++i) {
    schedule(device->scheduler, team, leader_time_ns(team));
    if (device->scheduler->action != kActionIdle) break;
    __nanosleep(kIdlePauseNs);
  }
  launch_next_chained(device, team);
}

// Waits until the graph in flight has written its completion word. By the team.
__device__ inline void await_completion(DeviceScheduler* device, BlockThreads& team) {
  if (team.is_leader()) {
    const Scheduler* s = device->scheduler;
    const uint64_t start_ns = global_time_ns();
    // Acquire: pairs with the graph's last write; its sampled ids were written before.
    while (load_acquire(&s->step.state->completion) != s->launch_number) {
      if (global_time_ns() - start_ns > kStepDeadlineNs) break;  // commit_step fails the step
    }
  }
  team.sync();
}

// Launches the graph of action_key fire-and-forget, with the exec whose turn it is. By the team.
__device__ inline uint32_t launch_beside(DeviceScheduler* device, BlockThreads& team) {
  if (team.is_leader()) {
    const uint32_t key = device->scheduler->action_key;
    const uint32_t turn = device->exec_turns[key];
    device->exec_turns[key] = static_cast<uint8_t>(turn ^ 1u);
    device->launch_result =
        launch_exec(device->execs[2 * key + turn], cudaStreamGraphFireAndForget);
  }
  team.sync();
  const uint32_t result = device->launch_result;
  team.sync();
  return result;
}

__device__ inline void run_persistent(void* state, BlockThreads& team, uint32_t relaunch_window) {
  DeviceScheduler* device = static_cast<DeviceScheduler*>(state);
  Scheduler* s = device->scheduler;
  for (uint32_t num_launches = 0; num_launches < relaunch_window;) {
    schedule(s, team, leader_time_ns(team));
    const uint32_t action = s->action;
    team.sync();
    if (action == kActionStop) return;
    if (action == kActionIdle) {
      __nanosleep(kIdlePauseNs);
      continue;
    }
    const uint32_t result = launch_beside(device, team);
    ++num_launches;
    if (result == 0) {
      await_completion(device, team);
    } else {
      fail_step(s, team, result);
    }
  }
  // The window is used up: the tail launch starts once this graph and all that it launched are
  // through.
  if (team.is_leader()) {
    note_launch_error(device, launch_exec(reinterpret_cast<uint64_t>(cudaGetCurrentGraphExec()),
                                          cudaStreamGraphTailLaunch));
  }
}

// `launch_error`: what the host's launch of the last action returned, 0 for success.
__device__ inline void run_host_step(void* state, BlockThreads& team, uint32_t launch_error) {
  DeviceScheduler* device = static_cast<DeviceScheduler*>(state);
  Scheduler* s = device->scheduler;
  if (launch_error != 0) fail_step(s, team, launch_error);
  schedule(s, team, leader_time_ns(team));
  if (team.is_leader()) {
    store_relaxed(&device->mailbox->action, s->action);
    store_relaxed(&device->mailbox->action_key, s->action_key);
    // Release: pairs with the host's acquire of turn, or with its stream synchronization.
    store_release(&device->mailbox->turn, ++device->host_turn);
  }
}

}  // namespace blink

#endif  // BLINK_DEVICE_LAUNCH_CUH
