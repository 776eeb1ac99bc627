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
};

// Bytes before the Scheduler; points the arrays of `device` into them unless it is null.
BLINK_FUNCTION constexpr uint64_t carve_device_scheduler(DeviceScheduler* device,
                                                         uint32_t num_keys) {
  Carver carver{reinterpret_cast<unsigned char*>(device), 0};
  carver.take<DeviceScheduler>(1);
  uint8_t* exec_turns = carver.take<uint8_t>(num_keys);
  if (device != nullptr) {
    device->exec_turns = exec_turns;
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

// Shared memory for the part of the state that every step touches.
struct HotMemory {
  uint64_t* words;
  uint64_t num_bytes;
  uint64_t offset_bytes;  // of the Scheduler in the allocation
};

// Of static shared memory; head and arrays of about 500 lanes.
constexpr uint64_t kMaxHotBytes = 32768;

// With more lanes than fit, the head alone is kept in shared memory.
BLINK_FUNCTION constexpr uint64_t hot_memory_bytes(uint32_t max_batch) {
  const uint64_t all = hot_state_bytes(max_batch);
  return all <= kMaxHotBytes ? all : (sizeof(Scheduler) + 15) / 16 * 16;
}

BLINK_FUNCTION Scheduler* scheduler_in(void* state, const HotMemory& hot) {
  return reinterpret_cast<Scheduler*>(static_cast<unsigned char*>(state) + hot.offset_bytes);
}

// Leader: points the copy's arrays to where they now are.
__device__ inline void point_hot_arrays(Scheduler* head, Scheduler* arrays_after,
                                        const HotMemory& hot) {
  if (hot.num_bytes < hot_state_bytes(head->limits.max_batch)) return;
  Carver carver{reinterpret_cast<unsigned char*>(arrays_after), 0};
  carver.take<Scheduler>(1);
  carve_hot_arrays(carver, head, head->limits.max_batch);
}

// Copies head and hot arrays into shared memory, where they stay while a kernel runs: the policy
// reads them all the time, and every acquire and release empties the L1. By the team.
__device__ inline Scheduler* load_hot(void* state, const HotMemory& hot, BlockThreads& team) {
  const uint64_t* source = reinterpret_cast<const uint64_t*>(scheduler_in(state, hot));
  for (uint32_t i = team.id(); i < hot.num_bytes / 8; i += team.count()) hot.words[i] = source[i];
  team.sync();
  Scheduler* head = reinterpret_cast<Scheduler*>(hot.words);
  if (team.is_leader()) point_hot_arrays(head, head, hot);
  team.sync();
  return head;
}

// Copies them back for the next kernel; the last thing before this one ends. By the team.
__device__ inline void store_hot(void* state, const HotMemory& hot, BlockThreads& team) {
  Scheduler* stored = scheduler_in(state, hot);
  team.sync();
  if (team.is_leader()) {
    point_hot_arrays(reinterpret_cast<Scheduler*>(hot.words), stored, hot);
  }
  team.sync();
  uint64_t* target = reinterpret_cast<uint64_t*>(stored);
  for (uint32_t i = team.id(); i < hot.num_bytes / 8; i += team.count()) target[i] = hot.words[i];
}

// Threads of the leader's warp, which launches while the others report.
constexpr uint32_t kLauncherThreads = 32;

// The leader launches an exec; all get the result. The inputs that all threads filled are ordered
// before it by the barrier and the fence. What schedule() did goes to the ring meanwhile: a launch
// takes 2 us, and so does a report over a link. By the team.
__device__ inline uint32_t launch_and_report(uint64_t exec, cudaStream_t mode, Scheduler* s,
                                             BlockThreads& team) {
  team.sync();
  if (team.id() >= kLauncherThreads) {
    report(s, team.id() - kLauncherThreads, team.count() - kLauncherThreads);
  }
  uint32_t result = 0;
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
  const uint32_t action = s->action;
  if (action == kActionStop) return;
  const uint64_t idle = team.is_leader() ? device.execs[2 * device.num_keys] : 0;
  if (action == kActionLaunch) {
    const uint64_t exec = team.is_leader() ? device.execs[2 * s->action_key] : 0;
    const uint32_t result = launch_and_report(exec, cudaStreamGraphTailLaunch, s, team);
    if (result == 0) return;
    fail_step(s, team, result);
  }
  const uint32_t result = launch_and_report(idle, cudaStreamGraphTailLaunch, s, team);
  if (team.is_leader()) note_launch_error(s, result);
}

__device__ inline void run_chained_step(void* state, const HotMemory& hot, BlockThreads& team) {
  const DeviceScheduler device = *static_cast<DeviceScheduler*>(state);
  Scheduler* s = load_hot(state, hot, team);
  schedule(s, team, leader_time_ns(team));
  launch_next_chained(device, s, team);
  store_hot(state, hot, team);
}

__device__ inline void run_chained_idle(void* state, const HotMemory& hot, BlockThreads& team) {
  const DeviceScheduler device = *static_cast<DeviceScheduler*>(state);
  Scheduler* s = load_hot(state, hot, team);
  for (uint32_t i = 0; i < kIdlePolls; ++i) {
    schedule(s, team, leader_time_ns(team));
    if (s->action != kActionIdle) break;
    __nanosleep(kIdlePauseNs);
  }
  launch_next_chained(device, s, team);
  store_hot(state, hot, team);
}

// Leader: waits until the graph in flight has written its completion word.
__device__ inline void await_completion(const Scheduler* s) {
  const uint64_t start_ns = global_time_ns();
  // Acquire: pairs with the graph's last write; its sampled ids were written before.
  while (load_acquire(&s->step.state->completion) != s->launch_number) {
    if (global_time_ns() - start_ns > kStepDeadlineNs) break;  // commit_step fails the step
  }
}

// A spinning block costs a prefill step of so many tokens 3.5 to 7 %, more than two tail launches:
// the persistent block steps aside for it.
constexpr uint32_t kYieldTokens = 512;

BLINK_FUNCTION bool yields_to_action(const Scheduler* s) {
  const GraphKey& key = s->graphs.keys[s->action_key];
  return key.kind == BLINK_GRAPH_PREFILL && key.seqlen >= kYieldTokens;
}

// Launches the graph of action_key with the exec whose turn it is: beside this one, or behind its
// end. By the team.
__device__ inline uint32_t launch_in_turn(const DeviceScheduler& device, Scheduler* s,
                                          BlockThreads& team, cudaStream_t mode) {
  uint64_t exec = 0;
  if (team.is_leader()) {
    const uint32_t key = s->action_key;
    const uint32_t turn = device.exec_turns[key];
    device.exec_turns[key] = static_cast<uint8_t>(turn ^ 1u);
    exec = device.execs[2 * key + turn];
  }
  return launch_and_report(exec, mode, s, team);
}

// Each execution of the graph ends when its window of launches is used up, or to yield; it
// tail-launches itself, behind the big graph if there is one. All state lies in device memory.
__device__ inline void run_persistent(void* state, const HotMemory& hot, BlockThreads& team,
                                      uint32_t relaunch_window) {
  const DeviceScheduler device = *static_cast<DeviceScheduler*>(state);
  Scheduler* s = load_hot(state, hot, team);
  for (uint32_t num_launches = 0; num_launches < relaunch_window;) {
    schedule(s, team, leader_time_ns(team));
    if (s->action == kActionStop) break;
    if (s->action == kActionIdle) {
      report(s, team.id(), team.count());
      team.sync();
      __nanosleep(kIdlePauseNs);
      continue;
    }
    ++num_launches;
    const bool yields = yields_to_action(s);
    const cudaStream_t mode = yields ? cudaStreamGraphTailLaunch : cudaStreamGraphFireAndForget;
    const uint32_t result = launch_in_turn(device, s, team, mode);
    if (result != 0) fail_step(s, team, result);
    if (result == 0 && yields) break;
    if (result == 0 && team.is_leader()) await_completion(s);
    team.sync();
  }
  if (s->action != kActionStop) {
    // It starts once this graph and all that was launched before are through.
    const uint64_t self = reinterpret_cast<uint64_t>(cudaGetCurrentGraphExec());
    const uint32_t result = launch_and_report(self, cudaStreamGraphTailLaunch, s, team);
    if (team.is_leader()) note_launch_error(s, result);
  }
  store_hot(state, hot, team);
}

// `launch_error`: what the host's launch of the last action returned, 0 for success.
__device__ inline void run_host_step(void* state, const HotMemory& hot, BlockThreads& team,
                                     uint32_t launch_error) {
  DeviceScheduler* device = static_cast<DeviceScheduler*>(state);
  Scheduler* s = load_hot(state, hot, team);
  if (launch_error != 0) fail_step(s, team, launch_error);
  schedule(s, team, leader_time_ns(team));
  report(s, team.id(), team.count());
  if (team.is_leader()) {
    store_relaxed(&device->mailbox->action, s->action);
    store_relaxed(&device->mailbox->action_key, s->action_key);
    // Release: pairs with the host's acquire of turn, or with its stream synchronization.
    store_release(&device->mailbox->turn, ++device->host_turn);
  }
  store_hot(state, hot, team);
}

}  // namespace blink

#endif  // BLINK_DEVICE_LAUNCH_CUH
