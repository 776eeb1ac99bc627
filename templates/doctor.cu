// The kernels of the device launch self-test, for `blink-runtime doctor`; a bundle's scheduler holds
// them too.
#include "blink/device/launch_test.cuh"

extern "C" __global__ void blink_test_relaunch(blink::LaunchTest* test) { blink::relaunch_self(test); }

extern "C" __global__ void blink_test_count(blink::LaunchTest* test) { blink::count_run(test); }

extern "C" __global__ void blink_test_window(blink::LaunchTest* test, const uint64_t* children) {
  blink::launch_window(test, children);
}
