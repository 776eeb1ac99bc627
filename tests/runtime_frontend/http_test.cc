// The pure parts of HTTP: the request parser, heads, keys, routes, the log's lines. Run with
// sanitizers.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "frontend/access_log.h"
#include "frontend/api_keys.h"
#include "frontend/http_message.h"
#include "frontend/http_request.h"
#include "frontend/http_routes.h"
#include "frontend/tls_channel.h"

namespace blink {
namespace {

// ---- request parser
// --------------------------------------------------------------------------------

constexpr HttpLimits kLimits{.max_header_bytes = 1024, .max_headers = 8, .max_body_bytes = 64};

std::string post(std::string_view fields, std::string_view body = "") {
  return "POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + std::string(fields) + "\r\n" +
         std::string(body);
}

struct Read {
  HttpFault fault;
  bool is_complete;
  size_t num_used;
  std::string path;
  std::string body;
  bool operator==(const Read&) const = default;
};

// Feeds pieces of the sizes that `next_size` gives.
template <typename NextSize>
Read read_in_pieces(std::string_view bytes, NextSize next_size) {
  HttpRequestParser parser(kLimits);
  size_t num_used = 0;
  while (num_used < bytes.size()) {
    // Not a part of a larger string: reading past the piece shows under the address sanitizer.
    const std::string piece(bytes.substr(num_used, next_size()));
    const size_t count = parser.feed(piece);
    CHECK(count <= piece.size());
    num_used += count;
    if (parser.fault() != HttpFault::none || parser.is_complete()) break;
    CHECK_EQUAL(count, piece.size());
  }
  if (parser.fault() != HttpFault::none) num_used = 0;  // how far a bad request was looked at
  return {parser.fault(), parser.is_complete(), num_used,
          parser.has_head() ? std::string(parser.request().path) : "", std::string(parser.body())};
}

Read read_whole(std::string_view bytes) {
  return read_in_pieces(bytes, [&] { return bytes.size(); });
}

TEST(requests_are_read) {
  struct Row {
    std::string bytes;
    std::string path;
    std::string body;
  };
  const Row rows[] = {
      {"GET /health?x=1 HTTP/1.0\r\n\r\n", "/health", ""},
      {"\r\nGET / HTTP/1.1\r\nHOST:x\r\n\r\n", "/", ""},
      {"GET http://a.b:80/health HTTP/1.1\r\nHost: x\r\n\r\n", "/health", ""},
      // Escapes of unreserved characters mean those; of others they stay, and none is read twice.
      {"GET /%68ea%6C%74h HTTP/1.0\r\n\r\n", "/health", ""},
      {"GET http://a/%7Ea%2d%2E%5F%30 HTTP/1.0\r\n\r\n", "/~a-._0", ""},
      {"GET /a%2Fb%2fc%3F%25%0d%00%C3%a9%252D HTTP/1.0\r\n\r\n",
       "/a%2Fb%2fc%3F%25%0d%00%C3%a9%252D", ""},
      // What only the query holds changes nothing, whole or not.
      {"GET /health?%68=%zz&%4 HTTP/1.0\r\n\r\n", "/health", ""},
      {"OPTIONS * HTTP/1.1\r\nHost: \r\n\r\n", "*", ""},
      {post("Content-Length: 5\r\n", "hello"), "/v1/completions", "hello"},
      {post("content-length:\t05 \r\n", "hello"), "/v1/completions", "hello"},
      {post("Content-Length: " + std::string(30, '0') + "5\r\n", "hello"), "/v1/completions",
       "hello"},
      {post("Transfer-Encoding: Chunked\r\n", "5\r\nhello\r\nA;x=\"y\"\r\n0123456789\r\n0\r\n\r\n"),
       "/v1/completions", "hello0123456789"},
      {post("Transfer-Encoding: chunked\r\n", "000\r\nTrailer: x\r\nOther: y\r\n\r\n"),
       "/v1/completions", ""},
      {post("X: caf\xc3\xa9 \t a\r\n"), "/v1/completions", ""},
  };
  for (const Row& row : rows) {
    const Read read = read_whole(row.bytes + "GET /next");
    CHECK_EQUAL(static_cast<int>(read.fault), 0);
    CHECK(read.is_complete);
    CHECK_EQUAL(read.num_used, row.bytes.size());
    CHECK_EQUAL(read.path, row.path);
    CHECK_EQUAL(read.body, row.body);
  }
}

TEST(what_could_be_taken_two_ways_is_refused) {
  struct Row {
    std::string bytes;
    HttpFault fault;
  };
  const auto get = [](std::string_view fields) {
    return "GET / HTTP/1.1\r\nHost: x\r\n" + std::string(fields) + "\r\n";
  };
  const std::string chunked = "Transfer-Encoding: chunked\r\n";
  const Row rows[] = {
      {"GET /\r\n", HttpFault::malformed_request_line},
      {"GET  / HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET /a b HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET / HTTP/1.1 \r\n", HttpFault::malformed_request_line},
      {"G(T / HTTP/1.1\r\n", HttpFault::malformed_request_line},
      {"\x16\x03\x01", HttpFault::malformed_request_line},
      {"\r\n\r\nGET / HTTP/1.1\r\n", HttpFault::malformed_request_line},
      {"GET / HTTP/2.0\r\n", HttpFault::unknown_version},
      {"GET / HTTP/0.9\r\n", HttpFault::unknown_version},
      {"GET / http/1.1\r\n", HttpFault::malformed_request_line},
      {"GET x HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET * HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET http:///a HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET http://a?/health HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET http://a#/health HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET /% HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET /%6 HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET /%6?8 HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET /%g8 HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET /%-1 HTTP/1.1\r\n", HttpFault::malformed_target},
      {"GET /\xc3\xa9 HTTP/1.1\r\n", HttpFault::malformed_target},
      {std::string("GET /\0 HTTP/1.1\r\n", 17), HttpFault::malformed_target},
      {"GET / HTTP/1.1\n", HttpFault::lone_line_feed},
      {"GET / HTTP/1.1\r\nHost: x\n", HttpFault::lone_line_feed},
      {get("A: b\rc\r\n"), HttpFault::malformed_header},
      {get(std::string_view("A: b\0c\r\n", 8)), HttpFault::malformed_header},
      {get("A: b\x7f\r\n"), HttpFault::malformed_header},
      {get("no colon\r\n"), HttpFault::malformed_header},
      {get(": empty\r\n"), HttpFault::malformed_header},
      {get("Content-Length : 1\r\n"), HttpFault::malformed_header},
      {get("A: b\r\n c\r\n"), HttpFault::folded_header},
      {get("A: b\r\n\tc\r\n"), HttpFault::folded_header},
      {"GET / HTTP/1.1\r\n Host: x\r\n", HttpFault::folded_header},
      {"GET / HTTP/1.1\r\n\r\n", HttpFault::missing_host},
      {get("host: y\r\n"), HttpFault::repeated_header},
      {get("Authorization: a\r\nauthorization: b\r\n"), HttpFault::repeated_header},
      {get("Content-Length: 1\r\nContent-Length: 1\r\n"), HttpFault::repeated_header},
      {get("Content-Length: 1, 1\r\n"), HttpFault::malformed_length},
      {get("Content-Length: +1\r\n"), HttpFault::malformed_length},
      {get("Content-Length: -1\r\n"), HttpFault::malformed_length},
      {get("Content-Length: 0x1\r\n"), HttpFault::malformed_length},
      {get("Content-Length:\r\n"), HttpFault::malformed_length},
      {get("Content-Length: 1000000000000000000x\r\n"), HttpFault::malformed_length},
      {get("Content-Length: 18446744073709551620x\r\n"), HttpFault::malformed_length},
      {get("Content-Length: 65\r\n"), HttpFault::body_too_large},
      // Too many digits for a number of 64 bits, or nearly: too large as any other.
      {get("Content-Length: 1000000000000000000\r\n"), HttpFault::body_too_large},
      {get("Content-Length: 18446744073709551615\r\n"), HttpFault::body_too_large},
      {get("Content-Length: 18446744073709551617\r\n"), HttpFault::body_too_large},
      {get("Content-Length: " + std::string(300, '9') + "\r\n"), HttpFault::body_too_large},
      {get("Content-Length: 1\r\n" + chunked), HttpFault::length_and_encoding},
      {get(chunked + "Content-Length: 1\r\n"), HttpFault::length_and_encoding},
      {get(chunked + chunked), HttpFault::repeated_header},
      {get("Transfer-Encoding: gzip, chunked\r\n"), HttpFault::unknown_transfer_coding},
      {get("Transfer-Encoding: identity\r\n"), HttpFault::unknown_transfer_coding},
      {get("Transfer-Encoding: xchunked\r\n"), HttpFault::unknown_transfer_coding},
      {get("Transfer-Encoding: \"chunked\"\r\n"), HttpFault::unknown_transfer_coding},
      {"GET / HTTP/1.0\r\n" + chunked + "\r\n", HttpFault::encoding_in_old_version},
      {post(chunked, "\r\n"), HttpFault::malformed_chunk},
      {post(chunked, "g\r\n"), HttpFault::malformed_chunk},
      {post(chunked, "0x1\r\n"), HttpFault::malformed_chunk},
      {post(chunked, " 1\r\n"), HttpFault::malformed_chunk},
      {post(chunked, "1 \r\n"), HttpFault::malformed_chunk},
      {post(chunked, "-1\r\n"), HttpFault::malformed_chunk},
      {post(chunked, "10000000000000001\r\n"), HttpFault::malformed_chunk},
      {post(chunked, "fffffffffffffff\r\n"), HttpFault::body_too_large},
      {post(chunked, "41\r\n"), HttpFault::body_too_large},
      {post(chunked, "20\r\n" + std::string(32, 'x') + "\r\n21\r\n"), HttpFault::body_too_large},
      {post(chunked, "1\r\nxx\r\n"), HttpFault::malformed_chunk},
      {post(chunked, "1\r\nx\n"), HttpFault::lone_line_feed},
      {post(chunked, "1\n"), HttpFault::lone_line_feed},
      {post(chunked, "1;" + std::string(300, 'e') + "\r\n"), HttpFault::malformed_chunk},
      {post(chunked, "0\r\nbad trailer\r\n"), HttpFault::malformed_header},
      {post(chunked, "0\r\n A: b\r\n"), HttpFault::folded_header},
      {post(chunked, "0\r\nA: " + std::string(1100, 'x')), HttpFault::headers_too_large},
      {get("A: " + std::string(1100, 'x')), HttpFault::headers_too_large},
      {"GET /" + std::string(1100, 'x'), HttpFault::target_too_long},
      {get("A:\r\nB:\r\nC:\r\nD:\r\nE:\r\nF:\r\nG:\r\nH:\r\n"), HttpFault::too_many_headers},
  };
  for (const Row& row : rows) {
    const Read read = read_whole(row.bytes);
    if (read.fault != row.fault) testing::fail(__FILE__, __LINE__, row.bytes);
    const HttpFaultText text = text_of_fault(read.fault, kLimits);
    CHECK(text.status >= 400 && text.status < 600 && text.status != 500);
    if (text.status == 413 || text.status == 414 || text.status == 431) {
      CHECK(text.message.find_first_of("0123456789") != std::string::npos);  // the limit
    }
  }
}

TEST(limits_hold_to_the_byte) {
  const std::string head = "GET / HTTP/1.1\r\nHost: x\r\nA: ";
  const std::string fits = head + std::string(1024 - head.size() - 4, 'x') + "\r\n\r\n";
  CHECK_EQUAL(fits.size(), size_t{1024});
  CHECK(read_whole(fits).is_complete);
  const std::string over = head + std::string(1024 - head.size() - 3, 'x') + "\r\n\r\n";
  CHECK(read_whole(over).fault == HttpFault::headers_too_large);
  CHECK(read_whole(post("Content-Length: 64\r\n", std::string(64, 'b'))).is_complete);
}

TEST(any_pieces_give_the_same) {
  const std::vector<std::string> seeds = {
      post("Content-Length: 5\r\nConnection: close, x\r\n", "hello"),
      post("Transfer-Encoding: chunked\r\n", "5;a=b\r\nhello\r\n1\r\nx\r\n0\r\nT: u\r\n\r\n"),
      "GET http://h/p?q HTTP/1.0\r\nConnection: keep-alive\r\nX-Request-Id: abc\r\n\r\n"};
  const std::string alphabet = "\r\n :;,0123456789abcdefGETHP/.*\t\x01\x80";
  std::mt19937 random(5);
  int num_complete = 0;
  for (int round = 0; round < 30'000; ++round) {
    std::string bytes = seeds[random() % seeds.size()] + seeds[random() % seeds.size()];
    for (uint32_t i = 0, n = random() % 3; i < n; ++i) {
      const size_t place = random() % bytes.size();
      if (random() % 2 == 0) {
        bytes[place] = alphabet[random() % alphabet.size()];
      } else {
        bytes.insert(place, 1, alphabet[random() % alphabet.size()]);
      }
    }
    const Read whole = read_whole(bytes);
    CHECK(whole == read_in_pieces(bytes, [] { return 1; }));
    CHECK(whole == read_in_pieces(bytes, [&] { return 1 + random() % 9; }));
    num_complete += whole.is_complete;
  }
  CHECK(num_complete > 1000);
}

TEST(a_parser_serves_one_request_after_the_other) {
  HttpRequestParser parser(kLimits);
  const std::string first = post("X-Request-Id: one\r\nContent-Length: 3\r\n", "abc");
  CHECK_EQUAL(parser.feed(first), first.size());
  CHECK_EQUAL(parser.request().request_id, std::string_view("one"));
  CHECK(parser.request().keeps_alive);
  parser.reset();
  CHECK(!parser.has_begun() && !parser.has_head());
  const std::string second = "HEAD /health HTTP/1.0\r\nOrigin: o\r\n\r\n";
  CHECK_EQUAL(parser.feed(second), second.size());
  CHECK(parser.is_complete() && parser.body().empty() && parser.request().request_id.empty());
  CHECK(parser.request().method == HttpMethod::head && !parser.request().keeps_alive);
  CHECK_EQUAL(parser.request().origin, std::string_view("o"));
}

// ---- keys
// ------------------------------------------------------------------------------------------

class TemporaryFile {
 public:
  explicit TemporaryFile(std::string_view text = "") {
    ::close(::mkstemp(path_.data()));
    write(text);
  }
  ~TemporaryFile() { ::unlink(path_.c_str()); }
  void write(std::string_view text) { std::ofstream(path_, std::ios::trunc) << text; }
  std::string read() const {
    std::stringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/blink-http-test-XXXXXX";
};

TEST(api_keys) {
  CHECK(!ApiKeys().asks_for_key());
  const TemporaryFile file("# comment\n\n  alice\tsecret-a \r\nsecret-b\n");
  const ApiKeys keys = ApiKeys::load({"one", "twotwo"}, file.path());
  CHECK(keys.asks_for_key());
  const auto name = [&](std::string_view text) {
    const std::string* found = keys.name_of(text);
    return found == nullptr ? std::string() : *found;
  };
  CHECK_EQUAL(name("Bearer one"), std::string("key-1"));
  CHECK_EQUAL(name("BEARER twotwo"), std::string("key-2"));
  CHECK_EQUAL(name("bearer secret-a"), std::string("alice"));
  CHECK_EQUAL(name("Bearer secret-b"), std::string("key-4"));
  for (const char* bad : {"", "Bearer", "Bearer ", "Bearer on", "Bearer oneone", "Bearer two",
                          "one", "Bearer  one", "Bearer one ", "Basic one", "Bearer alice"}) {
    CHECK(name(bad).empty());
  }
}

TEST(a_file_of_keys_that_holds_none_is_refused) {
  for (const char* text : {"", "\n \r\n", "# all gone\n"}) {
    const TemporaryFile file(text);
    // Also beside keys of the command line: it is most likely half written.
    for (const std::vector<std::string>& others : {std::vector<std::string>{}, {"one"}}) {
      std::string message;
      try {
        ApiKeys::load(others, file.path());
      } catch (const std::runtime_error& error) {
        message = error.what();
      }
      CHECK(message.starts_with("API keys: " + file.path() + " holds none"));
    }
  }
}

TEST(bad_files_of_keys_are_named_without_the_key) {
  for (const char* text : {"alice secret more", "a/b secret",
                           "alice s\xc3\xa9"
                           "cret",
                           "secret\nsecret", "alice secret\nalice other"}) {
    const TemporaryFile file(text);
    std::string message;
    try {
      ApiKeys::load({}, file.path());
    } catch (const std::runtime_error& error) {
      message = error.what();
    }
    CHECK(message.starts_with(file.path() + ":"));
    CHECK(message.find("secret") == std::string::npos);
  }
}

// ---- heads and routes
// ------------------------------------------------------------------------------

TEST(heads) {
  std::string head;
  const HttpResponse response{.status = 200, .body = "{}"};
  append_head(response, {.request_id = "id", .date = date_text(784111777)}, head);
  CHECK_EQUAL(head,
              std::string("HTTP/1.1 200 OK\r\nServer: blink\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT"
                          "\r\nX-Request-Id: id\r\nContent-Type: application/json\r\n"
                          "Content-Length: 2\r\n\r\n"));
  std::string chunks;
  for (const size_t size : {1, 255, 0x12345}) append_chunk_head(size, chunks);
  CHECK_EQUAL(chunks, std::string("1\r\nff\r\n12345\r\n"));
}

TEST(request_ids) {
  for (const char* good : {"a", "req-1.2_3:4", "ABC"}) CHECK(is_sane_request_id(good));
  CHECK(is_sane_request_id(std::string(64, 'x')));
  CHECK(!is_sane_request_id(std::string(65, 'x')));
  for (const char* bad : {"", "a b", "a\"", "a\r", "\xc3\xa9", "a,b"}) {
    CHECK(!is_sane_request_id(bad));
  }
}

TEST(pages_of_others_are_told_apart) {
  HttpRequest request;
  request.host = "localhost:8000";
  const auto is_foreign = [&](std::string_view origin, std::vector<std::string> allowed = {}) {
    request.origin = origin;
    return is_foreign_page(request, allowed);
  };
  CHECK(!is_foreign(""));  // not a page
  CHECK(!is_foreign("http://localhost:8000") && !is_foreign("https://localhost:8000"));
  CHECK(is_foreign("http://localhost:8001") && is_foreign("http://evil") && is_foreign("null"));
  CHECK(!is_foreign("http://good", {"http://good"}) && !is_foreign("http://x", {"*"}));
  CHECK(is_foreign("http://good.evil", {"http://good"}));
  CHECK(cors_headers("http://good", {}).empty());
  CHECK_EQUAL(cors_headers("http://evil", {"http://good"}), std::string("Vary: Origin\r\n"));
  CHECK(cors_headers("http://good", {"http://good"}).find("Allow-Origin: http://good\r\n") !=
        std::string::npos);
}

// ---- access log
// ------------------------------------------------------------------------------------

AccessLogEntry entry_of(std::string_view id) {
  AccessLogEntry entry;
  entry.begun_at_ns = 784111777'000001000;
  entry.id = id;
  entry.peer = "::1";
  entry.method = "GET";
  entry.path = "/a\"b\x01";
  entry.status = 200;
  return entry;
}

TEST(log_lines) {
  std::string line;
  AccessLogEntry entry = entry_of("id");
  append_log_line(entry, line);
  CHECK_EQUAL(
      line,
      std::string("{\"time\":\"1994-11-06T08:49:37.000001Z\",\"id\":\"id\",\"peer\":\"::1\","
                  "\"method\":\"GET\",\"path\":\"/a\\\"b\\u0001\",\"status\":200,"
                  "\"complete\":false,\"received_bytes\":0,\"sent_bytes\":0,\"e2e_us\":0}\n"));
  entry.path = std::string(1000, 'x');
  CHECK_EQUAL(entry.path.view().size(), size_t{120});
}

TEST(log_is_bounded_and_counts_what_it_drops) {
  int ends[2];
  CHECK(::pipe(ends) == 0);  // nobody reads: the log's file takes 64 KiB and then nothing
  Counter num_dropped;
  constexpr int kEntries = 3 * static_cast<int>(AccessLog::kCapacity);
  {
    const std::string path = "/dev/fd/" + std::to_string(ends[1]);
    AccessLog log(path, open_access_log(path), num_dropped);
    for (int i = 0; i < kEntries; ++i) log.add(entry_of("x"));
  }
  CHECK(num_dropped.value() > AccessLog::kCapacity);
  CHECK(num_dropped.value() < kEntries);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(log_goes_on_in_a_new_file_after_a_rotation) {
  const TemporaryFile file;
  Counter num_dropped;
  {
    AccessLog log(file.path(), open_access_log(file.path()), num_dropped);
    log.add(entry_of("before"));
    while (file.read().empty()) ::usleep(1000);
    const std::string moved = file.path() + ".1";
    CHECK(::rename(file.path().c_str(), moved.c_str()) == 0);
    log.reopen();
    log.add(entry_of("after"));
    while (file.read().empty()) ::usleep(1000);
    ::unlink(moved.c_str());
  }
  CHECK(file.read().find("\"after\"") != std::string::npos);
  CHECK(file.read().find("\"before\"") == std::string::npos);
  CHECK_EQUAL(num_dropped.value(), uint64_t{0});
}

TEST(bad_certificates_are_named) {
  const TemporaryFile file("no certificate");
  std::string message;
  try {
    const TlsContext context(file.path(), file.path());
  } catch (const std::runtime_error& error) {
    message = error.what();
  }
  CHECK(message.find(file.path()) != std::string::npos);
}

}  // namespace
}  // namespace blink

BLINK_TEST_MAIN
