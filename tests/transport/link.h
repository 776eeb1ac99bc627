// What the two programs of the link tests share: how the ends of a link are named on the command
// line.
#ifndef BLINK_TESTS_LINK_H
#define BLINK_TESTS_LINK_H

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>

#include "blink/abi.hpp"

namespace blink {

// --name=value ...
class Options {
 public:
  Options(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const char* equals = std::strchr(argv[i], '=');
      if (std::strncmp(argv[i], "--", 2) != 0 || equals == nullptr) {
        throw std::invalid_argument(std::string("not --name=value: ") + argv[i]);
      }
      values_[std::string(argv[i] + 2, static_cast<size_t>(equals - argv[i] - 2))] = equals + 1;
    }
  }
  std::string text(const std::string& name, const std::string& otherwise) const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : found->second;
  }
  uint64_t number(const std::string& name, uint64_t otherwise) const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : std::strtoull(found->second.c_str(), nullptr, 10);
  }

 private:
  std::map<std::string, std::string> values_;
};

inline RingSizes link_sizes(const Options& options) {
  RingSizes sizes;
  sizes.num_slots = static_cast<uint32_t>(options.number("slots", 8));
  sizes.num_front_ends = static_cast<uint32_t>(options.number("front-ends", 2));
  sizes.max_prompt_tokens = 1024;
  sizes.max_output_tokens = 1024;
  sizes.max_seqlen = 2048;
  sizes.max_batch = 4;
  sizes.vocab_size = 300;
  sizes.num_kv_pages = 1024;
  return sizes;
}

}  // namespace blink

#endif  // BLINK_TESTS_LINK_H
