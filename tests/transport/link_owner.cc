// link_owner --transport=verbs --listen-host=H --listen-port=P | --transport=shm --name=/NAME
// A ring with the fake owner beside it, until it is killed or its standard input ends.
//
// Options: --slots --front-ends --bundle-id --token-interval-us --gid-index.
#include <sys/prctl.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fake_owner.h"
#include "link.h"
#include "transport/shared_memory.h"
#include "transport/verbs.h"

namespace blink {
namespace {

int serve(const Options& options) {
  const RingSizes sizes = link_sizes(options);
  const uint64_t num_bytes = ring_layout_from_sizes(sizes).ring_bytes;
  const bool is_verbs = options.text("transport", "shm") == "verbs";
  std::optional<SharedMemory> shared;
  std::unique_ptr<std::byte, void (*)(void*)> own(nullptr, std::free);
  std::byte* memory = nullptr;
  if (is_verbs) {
    own.reset(static_cast<std::byte*>(std::aligned_alloc(4096, num_bytes)));
    memory = own.get();
    std::memset(memory, 0, num_bytes);
  } else {
    const std::string name = options.text("name", "/blink-link-test");
    SharedMemory::remove_stale(name);
    shared.emplace(SharedMemory::create(name, num_bytes));
    memory = shared->bytes().data();
  }
  create_ring({memory, num_bytes}, sizes, options.number("bundle-id", 0));
  FakeOwner::Options behaviour;
  behaviour.token_interval_us = options.number("token-interval-us", 0);
  FakeOwner owner(memory, behaviour);
  std::unique_ptr<VerbsOwner> link;
  if (is_verbs) {
    VerbsRingMemory ring{.address = memory, .num_bytes = num_bytes};
    std::memcpy(&ring.header, memory, sizeof(ring.header));
    VerbsOwnerConfig config;
    config.host = options.text("listen-host", "0.0.0.0");
    config.port = static_cast<uint16_t>(options.number("listen-port", 7471));
    link = serve_verbs(ring, config);
  }
  std::puts("owner ready");
  std::fflush(stdout);
  owner.run();
  return 0;
}

}  // namespace
}  // namespace blink

int main(int argc, char** argv) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    return blink::serve(blink::Options(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "link_owner: %s\n", error.what());
    return 1;
  }
}
