#include "frontend/tls_channel.h"

#include <algorithm>
#include <stdexcept>

#ifdef BLINK_HAS_TLS
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

#include "frontend/small_file.h"

namespace blink {
namespace {

template <typename T>
using Handle = std::unique_ptr<T, void (*)(T*)>;
using Certificate = Handle<X509>;

void free_bio(BIO* bio) { BIO_free(bio); }

// The oldest error of this thread's queue, which is emptied, in OpenSSL's words.
std::string openssl_reason() {
  const char* text = ERR_reason_error_string(ERR_get_error());
  ERR_clear_error();
  return text == nullptr ? "no reason given" : text;
}

bool is_der(std::string_view text) { return text.starts_with('\x30'); }

// A PEM file read whole.
struct PemFile {
  PemFile(std::string what, const std::string& given_path)
      : name(std::move(what)), path(given_path) {
    name += " " + path;
    try {
      text = read_small_file(path);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(name.substr(0, name.size() - path.size()) + error.what());
    }
    bytes.reset(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
    if (!bytes) throw std::bad_alloc();
  }
  bool holds(std::string_view word) const { return text.find(word) != std::string::npos; }
  [[noreturn]] void refuse(const std::string& why) const {
    ERR_clear_error();
    throw std::runtime_error(name + ": " + why);
  }

  std::string name;  // "TLS key /etc/server.key"
  std::string path;
  std::string text;
  Handle<BIO> bytes{nullptr, free_bio};
};

[[noreturn]] void refuse_certificate(const PemFile& file) {
  const std::string reason = openssl_reason();
  if (file.text.empty()) file.refuse("it is empty");
  if (is_der(file.text)) {
    file.refuse("it is DER, not PEM; openssl x509 -inform der -in " + file.path +
                " -out NEW writes PEM");
  }
  if (file.holds("-----BEGIN CERTIFICATE-----")) {
    file.refuse("its PEM is damaged (" + reason + "); copy it anew");
  }
  if (file.holds("PRIVATE KEY-----")) {
    file.refuse("it holds a key and no certificate; name the certificate with its chain here");
  }
  file.refuse("it is no PEM file: no line says -----BEGIN CERTIFICATE-----");
}

[[noreturn]] void refuse_key(const PemFile& file) {
  const std::string reason = openssl_reason();
  if (file.text.empty()) file.refuse("it is empty");
  if (is_der(file.text)) {
    file.refuse("it is DER, not PEM; openssl pkey -inform der -in " + file.path +
                " -out NEW writes PEM");
  }
  if (file.holds("ENCRYPTED")) {
    file.refuse("it is encrypted, and nobody is there to type its password; openssl pkey -in " +
                file.path + " -out NEW writes it without one");
  }
  if (file.holds("PRIVATE KEY-----")) {
    file.refuse("its PEM is damaged (" + reason + "); copy it anew");
  }
  if (file.holds("-----BEGIN CERTIFICATE-----")) {
    file.refuse("it holds a certificate and no key; name the certificate's key here");
  }
  file.refuse("it is no PEM file: no line says -----BEGIN PRIVATE KEY-----");
}

// The server's certificate, then those that vouch for it.
void use_certificates(SSL_CTX* context, const PemFile& file) {
  const Certificate own(PEM_read_bio_X509_AUX(file.bytes.get(), nullptr, nullptr, nullptr),
                        X509_free);
  if (!own) refuse_certificate(file);
  if (SSL_CTX_use_certificate(context, own.get()) != 1) {
    file.refuse("OpenSSL does not take it for a server (" + openssl_reason() + ")");
  }
  while (true) {
    Certificate next(PEM_read_bio_X509(file.bytes.get(), nullptr, nullptr, nullptr), X509_free);
    if (!next) break;
    if (SSL_CTX_add0_chain_cert(context, next.get()) != 1) {
      file.refuse("OpenSSL does not take its chain (" + openssl_reason() + ")");
    }
    (void)next.release();  // the context's
  }
  if (ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE) refuse_certificate(file);
  ERR_clear_error();
}

// Never asks a terminal: an encrypted key is an error.
int no_password(char*, int, int, void*) { return 0; }

void use_key(SSL_CTX* context, const PemFile& file, const std::string& certificate_path) {
  const Handle<EVP_PKEY> key(
      PEM_read_bio_PrivateKey(file.bytes.get(), nullptr, no_password, nullptr), EVP_PKEY_free);
  if (!key) refuse_key(file);
  if (X509_check_private_key(SSL_CTX_get0_certificate(context), key.get()) != 1) {
    file.refuse("it is not the key of the certificate " + certificate_path +
                "; name the one that the certificate was made for");
  }
  if (SSL_CTX_use_PrivateKey(context, key.get()) != 1) {
    file.refuse("OpenSSL does not take it for a server (" + openssl_reason() + ")");
  }
}

int choose_http_1_1(SSL*, const unsigned char** chosen, unsigned char* chosen_size,
                    const unsigned char* offered, unsigned offered_size, void*) {
  static constexpr unsigned char kOurs[] = "\x08http/1.1";
  unsigned char* out = nullptr;
  if (SSL_select_next_proto(&out, chosen_size, kOurs, sizeof(kOurs) - 1, offered, offered_size) !=
      OPENSSL_NPN_NEGOTIATED) {
    return SSL_TLSEXT_ERR_NOACK;  // a client that offers h2 alone finds out by itself
  }
  *chosen = out;
  return SSL_TLSEXT_ERR_OK;
}

}  // namespace

struct TlsContext::State {
  std::unique_ptr<SSL_CTX, void (*)(SSL_CTX*)> context{SSL_CTX_new(TLS_server_method()),
                                                       SSL_CTX_free};
};

TlsContext::TlsContext(const std::string& certificate_path, const std::string& key_path)
    : state_(std::make_unique<State>()) {
  SSL_CTX* context = state_->context.get();
  if (context == nullptr) throw std::runtime_error("TLS: " + openssl_reason());
  ERR_clear_error();
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_options(
      context, SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);          // an idle connection keeps none
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);  // tickets need no memory here
  SSL_CTX_set_alpn_select_cb(context, choose_http_1_1, nullptr);
  // Of TLS 1.2, what has forward secrecy and authenticated encryption; TLS 1.3 has nothing else.
  SSL_CTX_set_cipher_list(context, "ECDHE+AESGCM:ECDHE+CHACHA20");
  use_certificates(context, PemFile("TLS certificate", certificate_path));
  use_key(context, PemFile("TLS key", key_path), certificate_path);
}

TlsContext::~TlsContext() = default;

struct TlsChannel::State {
  std::unique_ptr<SSL, void (*)(SSL*)> ssl{nullptr, SSL_free};
  BIO* incoming = nullptr;  // owned by ssl
  BIO* outgoing = nullptr;  // owned by ssl
};

TlsChannel::TlsChannel(std::shared_ptr<const TlsContext> context)
    : context_(std::move(context)), state_(std::make_unique<State>()) {
  state_->ssl.reset(SSL_new(context_->state_->context.get()));
  state_->incoming = BIO_new(BIO_s_mem());
  state_->outgoing = BIO_new(BIO_s_mem());
  if (!state_->ssl || state_->incoming == nullptr || state_->outgoing == nullptr) {
    BIO_free(state_->incoming);
    BIO_free(state_->outgoing);
    throw std::bad_alloc();
  }
  SSL_set_bio(state_->ssl.get(), state_->incoming, state_->outgoing);
  SSL_set_accept_state(state_->ssl.get());
}

TlsChannel::~TlsChannel() = default;

bool TlsChannel::receive(std::string_view bytes, std::string& plain) {
  if (has_failed_) return false;
  SSL* ssl = state_->ssl.get();
  ERR_clear_error();
  const int size = static_cast<int>(bytes.size());
  if (BIO_write(state_->incoming, bytes.data(), size) != size) return false;
  int result = 1;
  if (!is_established_) {
    result = SSL_do_handshake(ssl);
    is_established_ = result == 1;
  }
  while (result > 0) {
    char piece[16 * 1024];  // one record
    result = SSL_read(ssl, piece, sizeof(piece));
    if (result > 0) plain.append(piece, static_cast<size_t>(result));
  }
  has_failed_ = SSL_get_error(ssl, result) != SSL_ERROR_WANT_READ;
  ERR_clear_error();
  return !has_failed_;
}

bool TlsChannel::send(std::string_view plain) {
  if (!is_established_ || has_failed_) return false;
  ERR_clear_error();
  // A memory BIO grows, so a write is never partial.
  const int size = static_cast<int>(plain.size());
  has_failed_ = size > 0 && SSL_write(state_->ssl.get(), plain.data(), size) != size;
  ERR_clear_error();
  return !has_failed_;
}

void TlsChannel::close() {
  ERR_clear_error();
  if (is_established_ && !has_failed_) SSL_shutdown(state_->ssl.get());
  ERR_clear_error();
}

void TlsChannel::take_to_send(std::string& out) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(state_->outgoing, &data);
  if (size <= 0) return;
  out.append(data, static_cast<size_t>(size));
  BIO_reset(state_->outgoing);
}

}  // namespace blink

#else  // without OpenSSL's headers at build time

namespace blink {

struct TlsContext::State {};
struct TlsChannel::State {};

TlsContext::TlsContext(const std::string&, const std::string&) {
  throw std::runtime_error(
      "this build has no TLS: OpenSSL's headers were missing when it was made");
}
TlsContext::~TlsContext() = default;

// No context, so no channel is ever made.
TlsChannel::TlsChannel(std::shared_ptr<const TlsContext>) {}
TlsChannel::~TlsChannel() = default;
bool TlsChannel::receive(std::string_view, std::string&) { return false; }
bool TlsChannel::send(std::string_view) { return false; }
void TlsChannel::close() {}
void TlsChannel::take_to_send(std::string&) {}

}  // namespace blink
#endif
