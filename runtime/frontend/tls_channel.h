// TLS over memory: bytes of the network in, bytes of the application out, and the other way. No
// sockets here.
#ifndef BLINK_FRONTEND_TLS_CHANNEL_H
#define BLINK_FRONTEND_TLS_CHANNEL_H

#include <memory>
#include <string>
#include <string_view>

namespace blink {

// A certificate with its key. Shared by the connections that began under it.
class TlsContext {
 public:
  // PEM files, each read once: the certificate with its chain, and the unencrypted key. TLS 1.2 and
  // newer. Throws std::runtime_error naming the file, what is wrong with it and what to do, or that
  // this build has no TLS.
  TlsContext(const std::string& certificate_path, const std::string& key_path);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsChannel;
  struct State;
  std::unique_ptr<State> state_;
};

// The server's side of one connection. One thread at a time.
class TlsChannel {
 public:
  explicit TlsChannel(std::shared_ptr<const TlsContext> context);
  ~TlsChannel();

  // Takes bytes of the network and appends what they carry to `plain`. False: the peer broke the
  // protocol or ended it; what to_send() holds is still to be sent.
  [[nodiscard]] bool receive(std::string_view bytes, std::string& plain);
  // Encrypts. False: not possible any more, or the handshake is not over.
  [[nodiscard]] bool send(std::string_view plain);
  // Ends the protocol from our side.
  void close();

  // Moves what is to be sent to the network to the end of `out`.
  void take_to_send(std::string& out);
  bool is_established() const { return is_established_; }

 private:
  struct State;
  std::shared_ptr<const TlsContext> context_;
  std::unique_ptr<State> state_;
  bool is_established_ = false;
  bool has_failed_ = false;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_TLS_CHANNEL_H
