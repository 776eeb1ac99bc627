// The access log: one line of JSON a request, written by a thread of its own.
#ifndef BLINK_FRONTEND_ACCESS_LOG_H
#define BLINK_FRONTEND_ACCESS_LOG_H

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>

#include "frontend/metrics.h"
#include "frontend/spsc_queue.h"
#include "transport/fd.h"

namespace blink {

// A text of at most N bytes in place, so that an entry owns no memory.
template <size_t N>
class ShortText {
 public:
  ShortText() = default;
  ShortText& operator=(std::string_view text) {
    size_ = static_cast<uint8_t>(text.size() < N ? text.size() : N);
    text.copy(bytes_, size_);
    return *this;
  }
  std::string_view view() const { return {bytes_, size_}; }

 private:
  static_assert(N < 256);
  char bytes_[N];
  uint8_t size_ = 0;
};

struct AccessLogEntry {
  int64_t begun_at_ns = 0;  // Unix time of the request's first byte
  ShortText<64> id;
  ShortText<46> peer;        // address, without port
  std::string_view method;   // a literal
  ShortText<120> path;       // without the query, which may hold secrets; cut when longer
  ShortText<64> key_name;    // empty: no key
  int status = 0;            // 499: the client left before the answer
  bool is_complete = false;  // the whole answer was handed to the socket
  bool has_tokens = false;   // the request reached the ring: the three below count
  uint32_t num_prompt_tokens = 0;
  uint32_t num_output_tokens = 0;
  uint64_t ttft_ns = 0;  // 0: no token came
  uint64_t e2e_ns = 0;
  uint64_t num_received_bytes = 0;  // of the body
  uint64_t num_sent_bytes = 0;      // head and body
};

// One line, with its line end.
void append_log_line(const AccessLogEntry& entry, std::string& out);

// Opens `path` for appending; "-" is standard output. Never waits, as for a pipe's reader. Throws
// std::runtime_error.
Fd open_access_log(const std::string& path);

// Bounded: kCapacity entries wait for the disk; what does not fit is dropped and counted.
class AccessLog {
 public:
  static constexpr size_t kCapacity = 8192;

  // `file` is what open_access_log(path) gave; reopen() opens `path` again.
  AccessLog(std::string path, Fd file, Counter& num_dropped);
  // Writes what waits, unless the file takes nothing for a second.
  ~AccessLog();

  // Network thread. Hot path (once a request): no allocation, no lock, no system call.
  void add(const AccessLogEntry& entry);

  // Any thread: opens the path anew, as after a rotation. Throws; the old file stays then.
  void reopen();

 private:
  void run();
  bool write_all(std::string_view text);

  const std::string path_;
  Counter& num_dropped_;
  SpscQueue<AccessLogEntry> queue_{kCapacity};
  Fd file_;                         // the writer's, once it runs
  std::atomic<int> next_file_{-1};  // opened by reopen(), taken by the writer
  std::atomic<bool> is_stopping_{false};
  std::thread thread_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_ACCESS_LOG_H
