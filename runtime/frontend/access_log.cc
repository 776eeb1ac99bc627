#include "frontend/access_log.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <utility>

#include "frontend/response_writer.h"

namespace blink {
namespace {

// How long an entry waits at most; a wake-up per request would cost the network thread a system
// call.
constexpr auto kInterval = std::chrono::milliseconds(50);
constexpr int kWritePatienceMs = 1000;
constexpr size_t kPieceBytes = 4096;  // a pipe that polls writable takes as much without blocking

void append_text(std::string_view name, std::string_view text, std::string& out) {
  out.append(",\"").append(name).append("\":\"");
  append_json_escaped(text, out);
  out += '"';
}

void append_number(std::string_view name, uint64_t value, std::string& out) {
  out.append(",\"").append(name).append("\":").append(std::to_string(value));
}

void append_time(int64_t unix_ns, std::string& out) {
  const auto seconds = static_cast<std::time_t>(unix_ns / 1'000'000'000);
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  char date[32];
  const size_t size = std::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &utc);
  char fraction[16];
  std::snprintf(fraction, sizeof(fraction), ".%06dZ",
                static_cast<int>(unix_ns % 1'000'000'000 / 1000));
  out.append("{\"time\":\"").append(date, size).append(fraction).append("\"");
}

}  // namespace

Fd open_access_log(const std::string& path) {
  constexpr int kFlags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK;
  Fd file(path == "-" ? ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3)
                      : ::open(path.c_str(), kFlags, 0640));
  if (file.is_open()) return file;
  const int error = errno;
  throw std::runtime_error("cannot open the access log: " + path + ": " +
                           (error == ENXIO ? "a pipe that nobody reads" : strerror(error)));
}

void append_log_line(const AccessLogEntry& entry, std::string& out) {
  append_time(entry.begun_at_ns, out);
  append_text("id", entry.id.view(), out);
  append_text("peer", entry.peer.view(), out);
  append_text("method", entry.method, out);
  append_text("path", entry.path.view(), out);
  append_number("status", static_cast<uint64_t>(entry.status), out);
  out += entry.is_complete ? ",\"complete\":true" : ",\"complete\":false";
  append_number("received_bytes", entry.num_received_bytes, out);
  append_number("sent_bytes", entry.num_sent_bytes, out);
  append_number("e2e_us", entry.e2e_ns / 1000, out);
  if (entry.has_tokens) {
    append_number("prompt_tokens", entry.num_prompt_tokens, out);
    append_number("output_tokens", entry.num_output_tokens, out);
    if (entry.ttft_ns > 0) append_number("ttft_us", entry.ttft_ns / 1000, out);
  }
  if (!entry.key_name.view().empty()) append_text("key", entry.key_name.view(), out);
  out += "}\n";
}

AccessLog::AccessLog(std::string path, Fd file, Counter& num_dropped)
    : path_(std::move(path)), num_dropped_(num_dropped), file_(std::move(file)) {
  thread_ = std::thread([this] { run(); });
}

AccessLog::~AccessLog() {
  is_stopping_.store(true, std::memory_order_release);  // pairs with run(): all adds came before
  thread_.join();
  if (const int file = next_file_.load(std::memory_order_relaxed); file >= 0) ::close(file);
}

void AccessLog::add(const AccessLogEntry& entry) {
  if (!queue_.push(entry)) num_dropped_.add();
}

void AccessLog::reopen() {
  // Acquire-release: whoever takes the file owns it; one that nobody took is closed here.
  const int unused =
      next_file_.exchange(open_access_log(path_).release(), std::memory_order_acq_rel);
  if (unused >= 0) ::close(unused);
}

void AccessLog::run() {
  ::prctl(PR_SET_NAME, "blink-log");
  std::string lines;
  AccessLogEntry entry;
  while (true) {
    const bool is_last = is_stopping_.load(std::memory_order_acquire);  // before the queue's end
    if (const int file = next_file_.exchange(-1, std::memory_order_acq_rel); file >= 0) {
      file_ = Fd(file);
    }
    lines.clear();
    uint64_t num_lines = 0;
    while (lines.size() < 64 * 1024 && queue_.pop(entry)) {
      append_log_line(entry, lines);
      ++num_lines;
    }
    if (num_lines == 0) {
      if (is_last) return;
      std::this_thread::sleep_for(kInterval);
    } else if (!write_all(lines)) {
      num_dropped_.add(num_lines);
      if (is_last) return;
    }
  }
}

// False: the file takes nothing.
bool AccessLog::write_all(std::string_view text) {
  while (!text.empty()) {
    pollfd wait{file_.get(), POLLOUT, 0};
    if (::poll(&wait, 1, kWritePatienceMs) <= 0) return false;
    const ssize_t count = ::write(file_.get(), text.data(), std::min(text.size(), kPieceBytes));
    if (count < 0 && errno != EINTR && errno != EAGAIN) return false;
    if (count > 0) text.remove_prefix(static_cast<size_t>(count));
  }
  return true;
}

}  // namespace blink
