// Stacks that threads of the emulated device run on, and how one gives way to the next.
#ifndef EMULATION_FIBERS_H
#define EMULATION_FIBERS_H

#include <functional>

#include "emulation/device.h"

namespace emulation {

// Makes the thread begin at `entry` on stack number `place`, the next time it is entered.
void prepare_fiber(Thread& thread, size_t place, void (*entry)());
// The first thing that `entry` calls.
void begin_fiber();
// Goes from the launch's own stack to the thread's; comes back when nobody of its warp can go on.
void enter_fibers(Thread& thread);
// Gives way to the next lane of the warp, else to the launch.
void leave_fiber();
// Runs `body`, until its end or until `abandon_fibers` anywhere inside.
void run_guarded(const std::function<void()>& body);
[[noreturn]] void abandon_fibers();

// The lane to go on with; null: none can.
Thread* lane_after_running();

}  // namespace emulation

#endif  // EMULATION_FIBERS_H
