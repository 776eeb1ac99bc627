// What HTTP wants of the machine, taken before a model is loaded: whoever names a port that is
// taken, or a file that cannot be used, hears it at once.
#ifndef BLINK_FRONTEND_HTTP_ENTRANCE_H
#define BLINK_FRONTEND_HTTP_ENTRANCE_H

#include <cstdint>
#include <memory>

#include "frontend/api_keys.h"
#include "frontend/front_end_config.h"
#include "frontend/tls_channel.h"
#include "transport/fd.h"

namespace blink {

struct HttpEntrance {
  // Throws std::invalid_argument or std::runtime_error naming what is wrong.
  explicit HttpEntrance(const FrontEndConfig& config);

  Fd listener;  // holds the address; clients are refused until it is listened on
  bool is_ipv6 = false;
  uint16_t port = 0;
  ApiKeys api_keys;
  std::shared_ptr<const TlsContext> tls;  // null: plain HTTP
  Fd access_log;                          // not open: none
};

// What a reload reads again. Throws std::runtime_error.
std::shared_ptr<const TlsContext> load_tls(const FrontEndConfig& config);

}  // namespace blink

#endif  // BLINK_FRONTEND_HTTP_ENTRANCE_H
