// The scheduler of one compiled model for cpu. Rendered by blinkc 0.1.0 from
// scheduler.cu.jinja; do not edit.
#include "blink/cpu/scheduler_loop.hpp"
#include "config.cuh"
#include "graph_table.cuh"

extern "C" {

int blink_cpu_scheduler_create(void* ring, uint64_t ring_bytes, const blink_step_buffers* buffers,
                               blink_cpu_launch launch, void* launch_arg, blink_cpu_scheduler** out,
                               char* error, uint32_t error_bytes) {
  return blink::create_cpu_scheduler(ring, ring_bytes, buffers, blink::graph_table(),
                                     blink::kMaxPrefillTokens, launch, launch_arg, out, error,
                                     error_bytes);
}

int blink_cpu_scheduler_run(blink_cpu_scheduler* scheduler) {
  return blink::run_cpu_scheduler(scheduler);
}

void blink_cpu_scheduler_destroy(blink_cpu_scheduler* scheduler) { delete scheduler; }

}  // extern "C"
