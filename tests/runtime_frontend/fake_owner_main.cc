// fake_owner RING_NAME [--name=value ...]: serves the ring until it is told to stop or its parent
// dies.
#include <sys/prctl.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "fake_owner.h"
#include "transport/shared_memory.h"

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "usage: fake_owner RING_NAME [--token-interval-us=N] [--burst=N] "
                 "[--max-running=N] [--stall-us=N]\n");
    return 2;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  blink::FakeOwner::Options options;
  for (int i = 2; i < argc; ++i) {
    const char* equals = std::strchr(argv[i], '=');
    if (equals == nullptr) return 2;
    const std::string name(argv[i], static_cast<size_t>(equals - argv[i]));
    const auto value = static_cast<uint64_t>(std::strtoull(equals + 1, nullptr, 10));
    if (name == "--token-interval-us") options.token_interval_us = value;
    if (name == "--burst") options.burst = static_cast<uint32_t>(value);
    if (name == "--max-running") options.max_running = static_cast<uint32_t>(value);
    if (name == "--stall-us") options.stall_us = value;
  }
  const blink::SharedMemory memory = blink::SharedMemory::open(argv[1]);
  blink::FakeOwner owner(memory.bytes().data(), options);
  std::puts("ready");
  std::fflush(stdout);
  owner.run();
  return 0;
}
