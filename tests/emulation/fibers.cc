#include "fibers.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulation {

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kStackBytes = 512 * 1024;
#else
constexpr size_t kStackBytes = 128 * 1024;
#endif

jmp_buf guard;
void* launch_stack_pointer;

// Stacks lie side by side in one reservation; pages come into being where they are touched. The
// compiler sees to it that no frame comes near kStackBytes (module.py).
constexpr size_t kMaxStacks = 8192;
constexpr size_t kKeptStacks = 1024;  // between launches
char* stacks;
size_t num_used;

char* stack_at(size_t place) {
  if (stacks == nullptr) {
    void* memory = mmap(nullptr, kMaxStacks * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("there is no memory for stacks");
    stacks = static_cast<char*>(memory);
  }
  if (place >= kMaxStacks) fail("a cluster of more than %zu threads", kMaxStacks);
  num_used = std::max(num_used, place + 1);
  return stacks + place * kStackBytes;
}

void give_back_stacks() {
  if (num_used > kKeptStacks)
    madvise(stacks + kKeptStacks * kStackBytes, (num_used - kKeptStacks) * kStackBytes,
            MADV_DONTNEED);
  num_used = 0;
}

// A bad address that a kernel touches ends its launch, not the process.
#ifdef __SANITIZE_ADDRESS__
struct FaultHandler {};  // the sanitizer says more
#else
struct FaultHandler {
  struct sigaction segment, bus;
  stack_t stack;
  char memory[64 * 1024];

  FaultHandler() {
    stack_t own = {};
    own.ss_sp = memory;
    own.ss_size = sizeof memory;
    sigaltstack(&own, &stack);
    struct sigaction action = {};
    action.sa_sigaction = [](int number, siginfo_t* info, void*) {
      if (running != nullptr) fail("touched %p, where nothing is", info->si_addr);
      signal(number, SIG_DFL);
    };
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &segment);
    sigaction(SIGBUS, &action, &bus);
  }
  ~FaultHandler() {
    sigaction(SIGSEGV, &segment, nullptr);
    sigaction(SIGBUS, &bus, nullptr);
    sigaltstack(&stack, nullptr);
  }
};
#endif

}  // namespace

#if defined(__x86_64__)

// Keeps the registers that a call preserves on the stack it leaves.
extern "C" void emulation_switch(void** leave, void* enter);
asm(R"(
.text
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, .-emulation_switch
)");

void prepare_fiber(Thread& thread, size_t place, void (*entry)()) {
  char* stack = thread.stack = stack_at(place);
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(stack, kStackBytes);
#endif
  void** top = reinterpret_cast<void**>(stack + kStackBytes);
  *--top = nullptr;  // keeps the stack's alignment at the entry, which never returns
  *--top = reinterpret_cast<void*>(entry);
  top -= 6;
  for (int i = 0; i < 6; ++i) top[i] = nullptr;
  thread.stack_pointer = top;
}

static void switch_stacks(void** leave, void* enter) { emulation_switch(leave, enter); }

#else

static std::vector<ucontext_t*> contexts;
static ucontext_t launch_context;

void prepare_fiber(Thread& thread, size_t place, void (*entry)()) {
  while (contexts.size() <= place) contexts.push_back(new ucontext_t);
  ucontext_t* context = contexts[place];
  getcontext(context);
  context->uc_stack.ss_sp = thread.stack = stack_at(place);
  context->uc_stack.ss_size = kStackBytes;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  thread.stack_pointer = context;
}

static void switch_stacks(void** leave, void* enter) {
  ucontext_t* from =
      leave == &launch_stack_pointer ? &launch_context : static_cast<ucontext_t*>(*leave);
  *leave = from;
  swapcontext(from, static_cast<ucontext_t*>(enter));
}

#endif

// The address sanitizer is told of every change of stacks.
struct Stack {
  const void* bottom;
  size_t num_bytes;
};

#ifdef __SANITIZE_ADDRESS__

static void* launch_fake_stack;

static Stack launch_stack() {
  static const Stack found = [] {
    pthread_attr_t attributes;
    void* bottom = nullptr;
    size_t num_bytes = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &bottom, &num_bytes);
    pthread_attr_destroy(&attributes);
    return Stack{bottom, num_bytes};
  }();
  return found;
}
static void announce(void** leave, Stack enter) {
  __sanitizer_start_switch_fiber(leave, enter.bottom, enter.num_bytes);
}
static void arrive(void* fake_stack) {
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

#else

static void* launch_fake_stack;
static Stack launch_stack() { return {}; }
static void announce(void**, Stack) {}
static void arrive(void*) {}

#endif

static Stack stack_of(const Thread& thread) { return {thread.stack, kStackBytes}; }

void begin_fiber() { arrive(nullptr); }

void enter_fibers(Thread& thread) {
  running = &thread;
  announce(&launch_fake_stack, stack_of(thread));
  switch_stacks(&launch_stack_pointer, thread.stack_pointer);
  arrive(launch_fake_stack);
  running = nullptr;
}

void leave_fiber() {
  Thread& me = *running;
  Thread* next = lane_after_running();
  if (next == &me) return;
  announce(&me.fake_stack, next != nullptr ? stack_of(*next) : launch_stack());
  if (next != nullptr) running = next;
  switch_stacks(&me.stack_pointer, next != nullptr ? next->stack_pointer : launch_stack_pointer);
  arrive(me.fake_stack);
}

void run_guarded(const std::function<void()>& body) {
  [[maybe_unused]] const FaultHandler handler;
  if (_setjmp(guard) == 0) body();
  if (running != nullptr) arrive(launch_fake_stack);
  running = nullptr;
  give_back_stacks();
}

void abandon_fibers() {
  if (running != nullptr) announce(nullptr, launch_stack());
  _longjmp(guard, 1);
}

}  // namespace emulation
