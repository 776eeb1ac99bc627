// In place of the verbs transport where libibverbs' headers were not there to build it.
#include "transport/verbs.h"

namespace blink {
namespace {

constexpr const char* kWhy =
    "verbs: this blink-runtime was built without libibverbs; install libibverbs-dev and build it "
    "again";

}  // namespace

std::unique_ptr<Transport> connect_verbs(const VerbsConnectConfig&) { throw RingError(kWhy); }

std::unique_ptr<VerbsPlace> hold_verbs_place(const VerbsOwnerConfig&) { throw RingError(kWhy); }

std::unique_ptr<VerbsOwner> serve_verbs(const VerbsRingMemory&, std::unique_ptr<VerbsPlace>) {
  throw RingError(kWhy);
}

std::unique_ptr<VerbsOwner> serve_verbs(const VerbsRingMemory&, const VerbsOwnerConfig&) {
  throw RingError(kWhy);
}

bool has_verbs_device(std::string& why) {
  why = kWhy;
  return false;
}

}  // namespace blink
