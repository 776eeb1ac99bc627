#include "native/host_loop.h"

#include <dlfcn.h>
#include <sys/prctl.h>

#include <chrono>

#include "transport/ring_layout.h"

namespace blink {
namespace {

constexpr auto kIdlePause = std::chrono::microseconds(50);
enum Action : uint32_t { kIdle = 0, kLaunch = 1, kStop = 2 };  // SchedulerAction of state.cuh

// HostMailbox of launch.cuh.
struct Mailbox {
  uint64_t turn;
  uint32_t action;
  uint32_t action_key;
};

template <typename Function>
Function find(void* library, const char* name) {
  void* symbol = ::dlsym(library, name);
  if (symbol == nullptr) throw RingError(std::string("the CUDA driver has no ") + name);
  return reinterpret_cast<Function>(symbol);
}

void* pointer(uint64_t value) { return reinterpret_cast<void*>(value); }

}  // namespace

// cuda.h, handles as void*; the driver library stays open as long as the process.
struct HostLoop::Calls {
  int (*set_current)(void* context);
  int (*launch_kernel)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                       void* stream, void** params, void** extra);
  int (*synchronize)(void* stream);
  int (*launch_graph)(void* exec, void* stream);

  explicit Calls(const std::string& path) {
    void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) throw RingError(std::string("no CUDA driver: ") + ::dlerror());
    set_current = find<decltype(set_current)>(library, "cuCtxSetCurrent");
    launch_kernel = find<decltype(launch_kernel)>(library, "cuLaunchKernel");
    synchronize = find<decltype(synchronize)>(library, "cuStreamSynchronize");
    launch_graph = find<decltype(launch_graph)>(library, "cuGraphLaunch");
  }
};

HostLoop::HostLoop(HostLoopConfig config)
    : config_(std::move(config)), calls_(std::make_unique<const Calls>(config_.library)) {}

HostLoop::~HostLoop() {
  if (thread_.joinable()) thread_.join();
}

void HostLoop::start() {
  thread_ = std::thread([this] { run(); });
}

bool HostLoop::join(double timeout_s) {
  std::unique_lock lock(mutex_);
  if (!thread_.joinable()) return true;
  return ended_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                         [this] { return has_ended_; });
}

void HostLoop::run() {
  ::prctl(PR_SET_NAME, "blink-host-loop");
  int error = calls_->set_current(pointer(config_.context));
  if (error == 0) error = run_until_stop();
  error_.store(error, std::memory_order_release);  // pairs with error()
  {
    const std::lock_guard lock(mutex_);
    has_ended_ = true;
  }
  ended_.notify_all();
}

// Returns 0 after the ring's stop word, else the error of the scheduler's own kernel. A graph that
// cannot be launched is told to the scheduler, which fails the step's requests and goes on.
int HostLoop::run_until_stop() {
  const auto* mailbox = static_cast<const Mailbox*>(pointer(config_.mailbox_address));
  uint32_t launch_error = 0;
  for (;;) {
    const int error = run_scheduler_step(launch_error);
    if (error != 0) return error;
    launch_error = 0;
    switch (static_cast<Action>(mailbox->action)) {
      case kStop:
        return 0;
      case kIdle:
        std::this_thread::sleep_for(kIdlePause);
        break;
      case kLaunch:
        launch_error = static_cast<uint32_t>(calls_->launch_graph(
            pointer(config_.execs[mailbox->action_key]), pointer(config_.stream)));
        num_steps_.fetch_add(1, std::memory_order_relaxed);
        break;
    }
  }
}

// Returns once the kernel, and the graph that was launched before it, are through: the stream's
// synchronization orders the mailbox's words before the reads that follow.
int HostLoop::run_scheduler_step(uint32_t launch_error) const {
  uint64_t state = config_.state_address;
  void* params[] = {&state, &launch_error};
  const int error =
      calls_->launch_kernel(pointer(config_.step_function), 1, 1, 1, config_.num_threads, 1, 1, 0,
                            pointer(config_.stream), params, nullptr);
  return error != 0 ? error : calls_->synchronize(pointer(config_.stream));
}

}  // namespace blink
