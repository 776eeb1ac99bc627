// link_front_end --transport=verbs --connect-host=H --connect-port=P | --transport=shm --name=/NAME
// The real front end over a link, speaking bytes as tokens, until it is killed.
//
// Options: --http-port (0: any) --front-end --bundle-id --transfer-timeout-ms.
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <memory>
#include <random>
#include <string>

#include "byte_codec.h"
#include "fake_owner.h"
#include "frontend/front_end.h"
#include "link.h"
#include "transport/reconnecting_transport.h"
#include "transport/verbs.h"

namespace blink {
namespace {

ReconnectingTransport::Connect connector(const Options& options) {
  const auto index = static_cast<uint32_t>(options.number("front-end", 0));
  const uint64_t bundle_id = options.number("bundle-id", 0);
  if (options.text("transport", "shm") != "verbs") {
    const ShmConnectConfig config{options.text("name", "/blink-link-test"), index, bundle_id};
    return [config] { return connect_shm(config); };
  }
  VerbsConnectConfig config;
  config.host = options.text("connect-host", "127.0.0.1");
  config.port = static_cast<uint16_t>(options.number("connect-port", 7471));
  config.front_end_index = index;
  config.bundle_id = bundle_id;
  std::random_device random;
  config.client_id = static_cast<uint64_t>(random()) << 32 | random();
  config.connect_timeout = config.transfer_timeout =
      std::chrono::milliseconds(options.number("transfer-timeout-ms", 10'000));
  return [config] { return connect_verbs(config); };
}

int serve(const Options& options) {
  auto transport = std::make_unique<ReconnectingTransport>(connector(options));
  FrontEndConfig config;
  config.port = static_cast<uint16_t>(options.number("http-port", 0));
  config.model_name = "fake";
  config.eos_token_ids = {FakeOwner::kEos};
  config.front_end_index = static_cast<uint32_t>(options.number("front-end", 0));
  config.has_chat_template = false;
  // Long: an owner that gets no core on a busy machine is not dead. One that is leaves the link.
  config.stall_timeout_ms = 600'000;
  const TransportInfo info = transport->info();
  FrontEnd front_end(config, std::move(transport), std::make_shared<ByteCodec>(),
                     [](const std::string&) { return std::string(); });
  front_end.start();
  std::printf("front end over %s %s at http://127.0.0.1:%u\n", info.kind, info.peer.c_str(),
              front_end.port());
  std::fflush(stdout);
  for (;;) ::pause();
}

}  // namespace
}  // namespace blink

int main(int argc, char** argv) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    return blink::serve(blink::Options(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "link_front_end: %s\n", error.what());
    return 1;
  }
}
