#include "frontend/http_entrance.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include <boost/asio/ip/tcp.hpp>

#include "frontend/access_log.h"
#include "transport/held_address.h"

namespace blink {
namespace {

using boost::asio::ip::tcp;

boost::asio::ip::address address_of(const std::string& host) {
  boost::system::error_code error;
  const auto address =
      boost::asio::ip::make_address(host == "localhost" ? "127.0.0.1" : host, error);
  if (error) throw std::runtime_error("'" + host + "' is no IP address, nor localhost");
  return address;
}

std::string text_of(const tcp::endpoint& endpoint) {
  const std::string host = endpoint.address().to_string();
  return (endpoint.address().is_v6() ? "[" + host + "]" : host) + ":" +
         std::to_string(endpoint.port());
}

std::string advice_for(int error) {
  switch (error) {
    case EADDRINUSE:
      return ": another process has this port; end it (ss -ltnp shows which) or choose another one";
    case EADDRNOTAVAIL:
      return ": this machine has no such address; 0.0.0.0 takes all that it has";
    case EACCES:
      return ": this user may not take this port; choose one from 1024 on";
    default:
      return "";
  }
}

Fd hold(const tcp::endpoint& endpoint) {
  Fd socket(::socket(endpoint.protocol().family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int error = socket.is_open() ? hold_address(socket, endpoint.data(),
                                                    static_cast<socklen_t>(endpoint.size()))
                                     : errno;
  if (error == 0) return socket;
  throw std::runtime_error("cannot listen on " + text_of(endpoint) + ": " + std::strerror(error) +
                           advice_for(error));
}

uint16_t port_of(const Fd& socket) {
  tcp::endpoint endpoint;
  auto size = static_cast<socklen_t>(endpoint.capacity());
  if (::getsockname(socket.get(), endpoint.data(), &size) != 0) {
    throw std::runtime_error(std::string("getsockname: ") + std::strerror(errno));
  }
  endpoint.resize(size);
  return endpoint.port();
}

}  // namespace

HttpEntrance::HttpEntrance(const FrontEndConfig& config) {
  check_front_end_config(config);
  const tcp::endpoint endpoint(address_of(config.host), config.port);
  is_ipv6 = endpoint.address().is_v6();
  listener = hold(endpoint);
  port = port_of(listener);
  api_keys = ApiKeys::load(config.api_keys, config.api_key_file);
  tls = load_tls(config);
  if (!config.access_log.empty()) access_log = open_access_log(config.access_log);
}

std::shared_ptr<const TlsContext> load_tls(const FrontEndConfig& config) {
  if (config.tls_certificate.empty()) return nullptr;
  return std::make_shared<TlsContext>(config.tls_certificate, config.tls_key);
}

}  // namespace blink
