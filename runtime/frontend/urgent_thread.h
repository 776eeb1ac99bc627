// Threads that a token's way to its client leads through.
#ifndef BLINK_FRONTEND_URGENT_THREAD_H
#define BLINK_FRONTEND_URGENT_THREAD_H

namespace blink {

// Names the calling thread (at most 15 characters) and asks the kernel for short time slices, which
// needs no privilege: from Linux 6.12 on, a thread with short slices that wakes up stops one with
// long ones at once instead of waiting for the end of its slice, 3 ms or more. Its share of the
// processor stays what its nice value says. Threads of other policies than SCHED_OTHER and
// SCHED_BATCH (`chrt`) keep theirs; where the kernel is older or refuses, nothing changes.
void become_urgent_thread(const char* name);

}  // namespace blink

#endif  // BLINK_FRONTEND_URGENT_THREAD_H
