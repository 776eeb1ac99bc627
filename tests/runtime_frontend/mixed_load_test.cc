// Two front ends on one ring, plain and TLS, under everything at once: good clients, clients that
// leave in the middle, nonsense, wrong keys, reloads, scrapes. For the thread sanitizer.
//
// mixed_load_test [SECONDS], and on until enough has happened
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include "byte_codec.h"
#include "check.h"
#include "fake_owner.h"
#include "frontend/front_end.h"

namespace blink {
namespace {

using namespace std::chrono_literals;

struct Files {
  std::string folder = "/tmp/blink-mixed-XXXXXX";
  Files() { CHECK(::mkdtemp(folder.data()) != nullptr); }
  ~Files() {
    for (const char* name : {"keys", "certificate", "key", "log0", "log1"}) {
      ::unlink(path(name).c_str());
    }
    ::rmdir(folder.c_str());
  }
  std::string path(const char* name) const { return folder + "/" + name; }
};

// A self-signed certificate and its key.
void write_certificate(const Files& files) {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  X509* certificate = X509_new();
  X509_set_version(certificate, 2);
  X509_gmtime_adj(X509_getm_notBefore(certificate), 0);
  X509_gmtime_adj(X509_getm_notAfter(certificate), 86400);
  X509_set_pubkey(certificate, key);
  X509_sign(certificate, key, EVP_sha256());
  std::FILE* file = std::fopen(files.path("certificate").c_str(), "w");
  PEM_write_X509(file, certificate);
  std::fclose(file);
  file = std::fopen(files.path("key").c_str(), "w");
  PEM_write_PrivateKey(file, key, nullptr, nullptr, 0, nullptr, nullptr);
  std::fclose(file);
  X509_free(certificate);
  EVP_PKEY_free(key);
}

class Client {
 public:
  Client(uint16_t port, SSL_CTX* tls) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    if (tls == nullptr) return;
    ssl_ = SSL_new(tls);
    SSL_set_fd(ssl_, fd_);
    CHECK(SSL_connect(ssl_) == 1);
  }
  ~Client() {
    SSL_free(ssl_);
    ::close(fd_);
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void send(std::string_view bytes) {
    if (ssl_ == nullptr) {
      ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    } else {
      SSL_write(ssl_, bytes.data(), static_cast<int>(bytes.size()));
    }
  }
  // Empty: the server ended it.
  std::string receive() {
    char bytes[4096];
    const auto count = ssl_ == nullptr ? ::recv(fd_, bytes, sizeof(bytes), 0)
                                       : SSL_read(ssl_, bytes, sizeof(bytes));
    return count > 0 ? std::string(bytes, static_cast<size_t>(count)) : std::string();
  }
  // Closes with a reset.
  void leave() {
    const linger now{1, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  }
  std::string receive_until(std::string_view end) {
    std::string all;
    while (!all.ends_with(end)) {
      const std::string more = receive();
      if (more.empty()) return all;
      all += more;
    }
    return all;
  }

 private:
  int fd_;
  SSL* ssl_ = nullptr;
};

std::string post(const std::string& body, const char* key = "good-key") {
  return std::string("POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ") + key +
         "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

struct Load {
  std::vector<std::unique_ptr<FrontEnd>> front_ends;
  SSL_CTX* tls = nullptr;
  std::atomic<bool> is_over{false};
  std::atomic<uint32_t> num_good{0};

  SSL_CTX* tls_of(size_t i) const { return i == 1 ? tls : nullptr; }
  uint16_t port(size_t i) const { return front_ends[i]->port(); }
};

// Each answer must be whole and its own.
void be_good(Load& load, size_t which, int number) {
  Client client(load.port(which), load.tls_of(which));
  for (int i = 0; !load.is_over; ++i) {
    const std::string text = "client " + std::to_string(number) + " " + std::to_string(i) + " ";
    client.send(post("{\"prompt\":\"" + text + "\",\"max_tokens\":64,\"stream\":true}"));
    const std::string answer = client.receive_until("0\r\n\r\n");
    if (answer.starts_with("HTTP/1.1 429")) return;  // the next client tries again
    CHECK(answer.starts_with("HTTP/1.1 200 "));
    std::string shown;
    constexpr std::string_view kKey = "\"text\":\"";
    for (size_t at = answer.find(kKey); at != std::string::npos; at = answer.find(kKey, at)) {
      at += kKey.size();
      shown += answer.substr(at, answer.find('"', at) - at);
    }
    CHECK_EQUAL(shown, text);
    ++load.num_good;
  }
}

void be_rude(Load& load, size_t which, std::mt19937& random) {
  const std::string good = post(
      "{\"prompt\":\"rude rude rude\",\"max_tokens\":200,\"stream\":true,\"ignore_eos\":true}");
  if (random() % 4 == 0) {  // not even TLS
    Client client(load.port(which), nullptr);
    client.send(std::string(good).replace(random() % 60, 1, "\n"));
    client.leave();
    return;
  }
  Client client(load.port(which), load.tls_of(which));
  switch (random() % 4) {
    case 0:
      client.send(good.substr(0, random() % good.size()));
      break;
    case 1:
      client.send(good + good + good);
      client.receive();
      break;
    case 2:
      client.send(post("{}", "wrong-key"));
      CHECK(client.receive().starts_with("HTTP/1.1 401"));
      break;
    default:
      client.send(
          "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n");
      client.receive();
  }
  if (random() % 2 == 0) client.leave();
}

void reload(Load& load, const Files& files) {
  for (int i = 0; !load.is_over; ++i) {
    const std::string next = files.path("keys") + ".next";
    std::ofstream(next) << "good good-key\nother-" << i << " key-" << i << "\n";
    CHECK(::rename(next.c_str(), files.path("keys").c_str()) == 0);
    for (auto& front_end : load.front_ends) front_end->reload();
    std::this_thread::sleep_for(2ms);
  }
}

// Nobody is turned away for being late: on a busy machine a thread here may be.
constexpr uint32_t kPatienceMs = 600'000;
constexpr uint32_t kEnough = 20;

FrontEndConfig config_of(const Files& files, size_t which) {
  FrontEndConfig config;
  config.header_timeout_ms = config.body_timeout_ms = kPatienceMs;
  config.idle_timeout_ms = config.write_timeout_ms = kPatienceMs;
  config.stall_timeout_ms = kPatienceMs;
  config.port = 0;
  config.model_name = "fake";
  config.front_end_index = static_cast<uint32_t>(which);
  config.eos_token_ids = {FakeOwner::kEos};
  config.api_key_file = files.path("keys");
  config.access_log = files.path(which == 0 ? "log0" : "log1");
  if (which == 1) {
    config.tls_certificate = files.path("certificate");
    config.tls_key = files.path("key");
  }
  return config;
}

uint32_t num_lines_of(const std::string& path) {
  std::ifstream log(path);
  return static_cast<uint32_t>(
      std::count(std::istreambuf_iterator<char>(log), std::istreambuf_iterator<char>(), '\n'));
}

void run_clients(Load& load, const Files& files, std::chrono::seconds time) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&load, i] {
      while (!load.is_over) be_good(load, static_cast<size_t>(i) % 2, i);
    });
  }
  for (unsigned i = 0; i < 3; ++i) {
    threads.emplace_back([&load, i] {
      std::mt19937 random(i);
      while (!load.is_over) be_rude(load, random() % 2, random);
    });
  }
  threads.emplace_back([&] { reload(load, files); });
  std::this_thread::sleep_for(time);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kPatienceMs);
  while ((load.num_good <= kEnough || num_lines_of(files.path("log0")) <= kEnough) &&
         std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(10ms);
  }
  load.is_over = true;
}

int run(std::chrono::seconds time) {
  const Files files;
  write_certificate(files);
  std::ofstream(files.path("keys")) << "good good-key\n";
  RingSizes sizes;
  sizes.num_slots = 64;
  sizes.num_front_ends = 2;
  sizes.max_prompt_tokens = 256;
  sizes.max_output_tokens = 256;
  sizes.max_seqlen = 512;
  sizes.max_batch = 32;
  sizes.vocab_size = 300;
  sizes.num_kv_pages = 1 << 16;
  const size_t num_bytes = ring_layout_from_sizes(sizes).ring_bytes;
  const std::unique_ptr<std::byte, void (*)(void*)> memory(
      static_cast<std::byte*>(std::aligned_alloc(4096, num_bytes)), std::free);
  std::memset(memory.get(), 0, num_bytes);
  create_ring({memory.get(), num_bytes}, sizes);
  FakeOwner owner(memory.get(), FakeOwner::Options{});
  std::thread owner_thread([&] { owner.run(); });

  Load load;
  load.tls = SSL_CTX_new(TLS_client_method());
  for (size_t i = 0; i < 2; ++i) {
    load.front_ends.push_back(std::make_unique<FrontEnd>(
        config_of(files, i), connect_mapped(memory.get(), num_bytes), std::make_shared<ByteCodec>(),
        [](const std::string&) { return std::string(); }));
    load.front_ends[i]->start();
    while (load.front_ends[i]->health() != Health::serving) std::this_thread::yield();
  }
  run_clients(load, files, time);
  const RingView view(memory.get());
  for (auto& front_end : load.front_ends) front_end->stop(60s);
  std::atomic_ref<uint32_t>(view.header()->stop).store(1, std::memory_order_release);
  owner_thread.join();
  SSL_CTX_free(load.tls);
  load.front_ends.clear();
  for (uint32_t slot = 0; slot < sizes.num_slots; ++slot) {
    CHECK_EQUAL(unpack_status(view.status(slot)->word).state, BLINK_STATE_EMPTY);
  }
  std::string line;
  uint32_t num_lines = 0;
  for (std::ifstream log(files.path("log0")); std::getline(log, line); ++num_lines) {
    CHECK(line.starts_with("{\"time\":\"") && line.ends_with("}"));
    CHECK(line.find("-key\"") == std::string::npos);  // a name, never a key
  }
  std::printf("%u good answers, %u lines in a log\n", load.num_good.load(), num_lines);
  CHECK(num_lines > kEnough);
  CHECK(load.num_good > kEnough);
  return 0;
}

}  // namespace
}  // namespace blink

int main(int argc, char** argv) {
  return blink::run(std::chrono::seconds(argc > 1 ? std::atoi(argv[1]) : 5));
}
