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
  uint32_t reserved0;
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

// Copies the scheduler's head into shared memory, where it stays while a kernel runs: the policy
// reads its scalars and pointers all the time, and every acquire empties the L1. By the team.
__device__ inline Scheduler* load_head(const Scheduler* stored, BlockThreads& team) {
  __shared__ uint64_t words[sizeof(Scheduler) / 8];
  const uint64_t* source = reinterpret_cast<const uint64_t*>(stored);
  for (uint32_t i = team.id(); i < sizeof(Scheduler) / 8; i += team.count()) words[i] = source[i];
  team.sync();
  return reinterpret_cast<Scheduler*>(words);
}

// Copies the head back for the next kernel; last thing before this one ends. By the team.
__device__ inline void store_head(Scheduler* stored, const Scheduler* head, BlockThreads& team) {
  team.sync();
  const uint64_t* source = reinterpret_cast<const uint64_t*>(head);
  uint64_t* target = reinterpret_cast<uint64_t*>(stored);
  for (uint32_t i = team.id(); i < sizeof(Scheduler) / 8; i += team.count()) target[i] = source[i];
}

// Leader launches an exec; all get the result. The inputs that all threads filled are ordered
// before it by the barrier and the fence. By the team.
__device__ inline uint32_t launch_exec(uint64_t exec, cudaStream_t mode, BlockThreads& team) {
  uint32_t result = 0;
  team.sync();
  if (team.is_leader()) {
    __threadfence();
    result = static_cast<uint32_t>(cudaGraphLaunch(reinterpret_cast<cudaGraphExec_t>(exec), mode));
  }
  return static_cast<uint32_t>(team.broadcast(result));
}

// Leader: without the graph that should go on, nothing will; the host sees the heartbeat stop.
__device__ inline void note_launch_error(const Scheduler* s, uint32_t result) {
  if (result != 0) store_relaxed(&s->header->launch_error, result);
}

// Tail-launches the graph of action_key, or the idle graph when there is nothing to run or the
// launch fails; its requests fail then and the idle graph goes on with the others. By the team.
__device__ inline void launch_next_chained(const DeviceScheduler& device, Scheduler* s,
                                           BlockThreads& team) {
  if (s->action == kActionStop) return;
  if (s->action == kActionLaunch) {
    const uint64_t exec = team.is_leader() ? device.execs[2 * s->action_key] : 0;
    const uint32_t result = launch_exec(exec, cudaStreamGraphTailLaunch, team);
    if (result == 0) return;
    fail_step(s, team, result);
  }
  const uint64_t idle = team.is_leader() ? device.execs[2 * device.num_keys] : 0;
  const uint32_t result = launch_exec(idle, cudaStreamGraphTailLaunch, team);
  if (team.is_leader()) note_launch_error(s, result);
}

__device__ inline void run_chained_step(void* state, BlockThreads& team) {
  const DeviceScheduler device = *static_cast<DeviceScheduler*>(state);
  Scheduler* s = load_head(device.scheduler, team);
  schedule(s, team, leader_time_ns(team));
  launch_next_chained(device, s, team);
  store_head(device.scheduler, s, team);
}

__device__ inline void run_chained_idle(void* state, BlockThreads& team) {
  const DeviceScheduler device = *static_cast<DeviceScheduler*>(state);
  Scheduler* s = load_head(device.scheduler, team);
  for (uint32_t i = 0; i < kIdlePolls; ++i) {
    schedule(s, team, leader_time_ns(team));
    if (s->action != kActionIdle) break;
    __nanosleep(kIdlePauseNs);
  }
  launch_next_chained(device, s, team);
  store_head(device.scheduler, s, team);
}

// Leader: waits until the graph in flight has written its completion word.
__device__ inline void await_completion(const Scheduler* s) {
  const uint64_t start_ns = global_time_ns();
  // Acquire: pairs with the graph's last write; its sampled ids were written before.
  while (load_acquire(&s->step.state->completion) != s->launch_number) {
    if (global_time_ns() - start_ns > kStepDeadlineNs) break;  // commit_step fails the step
  }
}

// Launches the graph of action_key fire-and-forget, with the exec whose turn it is. By the team.
__device__ inline uint32_t launch_beside(const DeviceScheduler& device, const Scheduler* s,
                                         BlockThreads& team) {
  uint64_t exec = 0;
  if (team.is_leader()) {
    const uint32_t key = s->action_key;
    const uint32_t turn = device.exec_turns[key];
    device.exec_turns[key] = static_cast<uint8_t>(turn ^ 1u);
    exec = device.execs[2 * key + turn];
  }
  return launch_exec(exec, cudaStreamGraphFireAndForget, team);
}

__device__ inline void run_persistent(void* state, BlockThreads& team, uint32_t relaunch_window) {
  const DeviceScheduler device = *static_cast<DeviceScheduler*>(state);
  Scheduler* s = load_head(device.scheduler, team);
  for (uint32_t num_launches = 0; num_launches < relaunch_window;) {
    schedule(s, team, leader_time_ns(team));
    if (s->action == kActionStop) break;
    if (s->action == kActionIdle) {
      team.sync();  // all have read the action
      __nanosleep(kIdlePauseNs);
      continue;
    }
    ++num_launches;
    const uint32_t result = launch_beside(device, s, team);
    if (result != 0) fail_step(s, team, result);
    if (result == 0 && team.is_leader()) await_completion(s);
    team.sync();
  }
  if (s->action != kActionStop) {
    // The window is used up: the tail launch starts once this graph and all that it launched are
    // through.
    const uint64_t self = reinterpret_cast<uint64_t>(cudaGetCurrentGraphExec());
    const uint32_t result = launch_exec(self, cudaStreamGraphTailLaunch, team);
    if (team.is_leader()) note_launch_error(s, result);
  }
  store_head(device.scheduler, s, team);
}

// `launch_error`: what the host's launch of the last action returned, 0 for success.
__device__ inline void run_host_step(void* state, BlockThreads& team, uint32_t launch_error) {
  DeviceScheduler* device = static_cast<DeviceScheduler*>(state);
  Scheduler* s = load_head(device->scheduler, team);
  if (launch_error != 0) fail_step(s, team, launch_error);
  schedule(s, team, leader_time_ns(team));
  if (team.is_leader()) {
    store_relaxed(&device->mailbox->action, s->action);
    store_relaxed(&device->mailbox->action_key, s->action_key);
    // Release: pairs with the host's acquire of turn, or with its stream synchronization.
    store_release(&device->mailbox->turn, ++device->host_turn);
  }
  store_head(device->scheduler, s, team);
}

}  // namespace blink

#endif  // BLINK_DEVICE_LAUNCH_CUH
