// A CPU target without a model, whose step at the stop ends when the ring's second byte says so.
#include <stdint.h>
#include <unistd.h>

static volatile const char* ring;
static int model_memory;

int blink_cpu_model_create(void* weights, uint32_t num_weights, uint32_t pages, uint32_t threads,
                           void** out, char* error, uint32_t error_bytes) {
  *out = &model_memory;
  return 0;
}

void* blink_cpu_model_buffers(void* model) { return model; }

int blink_cpu_model_launch(void* model, uint32_t key) { return 0; }

void blink_cpu_model_destroy(void* model) {}

int blink_cpu_scheduler_create(void* memory, uint64_t num_bytes, void* buffers, void* launch,
                               void* model, void** out, char* error, uint32_t error_bytes) {
  ring = memory;
  *out = memory;
  return 0;
}

void blink_cpu_scheduler_run(void* scheduler) {
  while (ring[0] == 0 || ring[1] == 0) usleep(1000);
}

void blink_cpu_scheduler_destroy(void* scheduler) {}
