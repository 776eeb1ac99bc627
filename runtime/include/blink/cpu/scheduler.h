/* The CPU target's scheduler, exported by the bundle's target.so. Plain C. */
#ifndef BLINK_CPU_SCHEDULER_H
#define BLINK_CPU_SCHEDULER_H

#include <stdint.h>

#include "blink/step.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct blink_cpu_scheduler blink_cpu_scheduler;

/* Runs the graph of a key: reads the step buffers, writes sampled_ids, then completion. 0: done. */
typedef int (*blink_cpu_launch)(void* launch_arg, uint32_t key_index);

/* Makes a scheduler over a ring whose header is filled, and over the model's step buffers, which
 * must outlive it. Returns 0, or 1 with a text in `error`. */
int blink_cpu_scheduler_create(void* ring, uint64_t ring_bytes, const blink_step_buffers* buffers,
                               blink_cpu_launch launch, void* launch_arg, blink_cpu_scheduler** out,
                               char* error, uint32_t error_bytes);

/* Serves the ring on the calling thread until its stop word is set; returns 0. Sleeps when there is
 * nothing to do, at most half a millisecond at a time. */
int blink_cpu_scheduler_run(blink_cpu_scheduler* scheduler);

void blink_cpu_scheduler_destroy(blink_cpu_scheduler* scheduler);

#ifdef __cplusplus
}
#endif

#endif /* BLINK_CPU_SCHEDULER_H */
