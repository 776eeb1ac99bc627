#include "frontend/urgent_thread.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace blink {
namespace {

constexpr uint64_t kSliceNs = 100'000;  // the least that the kernel grants

// The kernel's struct sched_attr, first version (include/uapi/linux/sched/types.h); the C library
// has neither it nor its calls before glibc 2.41.
struct SchedulingAttributes {
  uint32_t size = sizeof(SchedulingAttributes);
  uint32_t policy = 0;
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime_ns = 0;  // the slice, with SCHED_OTHER and SCHED_BATCH
  uint64_t deadline_ns = 0;
  uint64_t period_ns = 0;
};
static_assert(sizeof(SchedulingAttributes) == 48);

void ask_for_short_slices() {
  SchedulingAttributes attributes;
  if (::syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) != 0) return;
  if (attributes.policy != SCHED_OTHER && attributes.policy != SCHED_BATCH) return;
  attributes.runtime_ns = kSliceNs;
  ::syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

void become_urgent_thread(const char* name) {
  ::prctl(PR_SET_NAME, name);
  ask_for_short_slices();
}

}  // namespace blink
