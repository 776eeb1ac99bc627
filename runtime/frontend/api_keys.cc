#include "frontend/api_keys.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "frontend/http_message.h"
#include "frontend/small_file.h"

namespace blink {
namespace {

constexpr std::string_view kBlank = " \t\r";

// Compares all bytes whatever the first difference.
bool equals_in_constant_time(std::string_view given, std::string_view expected) {
  unsigned difference = given.size() == expected.size() ? 0 : 1;
  for (size_t i = 0; i < expected.size(); ++i) {
    const char byte = given.empty() ? '\0' : given[i % given.size()];
    difference |= static_cast<unsigned char>(byte) ^ static_cast<unsigned char>(expected[i]);
  }
  return difference == 0;
}

bool is_visible_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c > 0x20 && c < 0x7f; });
}

std::string_view next_word(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(kBlank), line.size()));
  const std::string_view word = line.substr(0, line.find_first_of(kBlank));
  line.remove_prefix(word.size());
  return word;
}

std::string read_key_file(const std::string& path) {
  try {
    return read_small_file(path);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(std::string("cannot read API keys: ") + error.what());
  }
}

}  // namespace

ApiKeys ApiKeys::load(const std::vector<std::string>& keys, const std::string& path) {
  ApiKeys loaded;
  loaded.asks_for_key_ = !keys.empty() || !path.empty();
  for (const std::string& key : keys) {
    const std::string name = "key-" + std::to_string(loaded.keys_.size() + 1);
    loaded.add(name, key, name);
  }
  if (path.empty()) return loaded;
  std::istringstream lines(read_key_file(path));
  const size_t num_given = loaded.keys_.size();
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    std::string_view rest = line;
    const std::string_view first = next_word(rest);
    const std::string_view second = next_word(rest);
    if (first.empty() || first.front() == '#') continue;
    const std::string where = path + ":" + std::to_string(number);
    if (!next_word(rest).empty()) {
      throw std::runtime_error(where + ": more than a name and a key");
    }
    if (second.empty()) {
      loaded.add("key-" + std::to_string(loaded.keys_.size() + 1), std::string(first), where);
    } else {
      loaded.add(std::string(first), std::string(second), where);
    }
  }
  if (loaded.keys_.size() == num_given) {
    throw std::runtime_error("API keys: " + path +
                             " holds none: write a key, or \"NAME KEY\", in each line");
  }
  return loaded;
}

void ApiKeys::add(std::string name, std::string secret, const std::string& where) {
  if (secret.empty() || !is_visible_ascii(secret)) {
    throw std::runtime_error(where + ": a key must be of visible ASCII characters");
  }
  if (!is_sane_request_id(name)) {
    throw std::runtime_error(where + ": a key's name must be 1 to 64 of letters, digits and -_.:");
  }
  for (const Key& key : keys_) {
    if (key.secret == secret) throw std::runtime_error(where + ": the same key as " + key.name);
    if (key.name == name) throw std::runtime_error(where + ": the name is taken: " + name);
  }
  keys_.push_back({std::move(name), std::move(secret)});
}

const std::string* ApiKeys::name_of(std::string_view authorization) const {
  constexpr std::string_view kScheme = "bearer ";
  if (authorization.size() < kScheme.size()) return nullptr;
  for (size_t i = 0; i < kScheme.size(); ++i) {
    if ((authorization[i] | 0x20) != (kScheme[i] | 0x20)) return nullptr;
  }
  const std::string_view given = authorization.substr(kScheme.size());
  const std::string* found = nullptr;
  for (const Key& key : keys_) {
    if (equals_in_constant_time(given, key.secret)) found = &key.name;
  }
  return found;
}

}  // namespace blink
