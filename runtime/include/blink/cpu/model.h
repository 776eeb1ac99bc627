/* The CPU target's model: what segments.cpp of a bundle exports, plain C. Weights stay the
 * caller's. */
#ifndef BLINK_CPU_MODEL_H
#define BLINK_CPU_MODEL_H

#include <stdint.h>

#include "blink/step.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct blink_cpu_model blink_cpu_model;

/* Packs the weights and allocates everything a step needs.
 *
 * weights: fp32 arrays in the manifest's order; they must outlive the model. num_kv_pages counts
 * the sink page. num_threads 0: as many as the process may use. Returns 0, or 1 with a message in
 * `error`. */
int blink_cpu_model_create(const void* const* weights, uint32_t num_weights, uint32_t num_kv_pages,
                           uint32_t num_threads, blink_cpu_model** out, char* error,
                           uint32_t error_bytes);

/* Step buffers, owned by the model. */
const blink_step_buffers* blink_cpu_model_buffers(blink_cpu_model* model);

/* Runs the step in the buffers to its end, then stores sampled_ids and completion (release).
 * Returns 0, or 1 when the key or the step's sizes are out of range. With BLINK_CPU_PAD=1 in the
 * environment at create, the key's full size is run, padding included, as a captured graph would.
 */
int blink_cpu_model_launch(blink_cpu_model* model, uint32_t key_index);

/* Logits of the last step, fp32 [num_rows][vocab_size]; for checks. Valid until the next launch. */
const float* blink_cpu_model_logits(const blink_cpu_model* model);

void blink_cpu_model_destroy(blink_cpu_model* model);

#ifdef __cplusplus
}
#endif

#endif /* BLINK_CPU_MODEL_H */
