#include "frontend/field_reader.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace blink {

namespace json = boost::json;

void reject(std::string_view param, std::string message, std::string code) {
  throw Rejected{bad_request(std::string(param), std::move(message), std::move(code))};
}

void reject_type(std::string_view param, const char* expected) {
  reject(param, "'" + std::string(param) + "' must be " + expected + ".", "invalid_type");
}

void reject_unsupported(std::string_view param, std::string message) {
  reject(param, "'" + std::string(param) + "' " + std::move(message), "unsupported_parameter");
}

std::string_view view(const json::string& text) { return {text.data(), text.size()}; }

bool read_bool(std::string_view name, const json::value& value) {
  if (!value.is_bool()) reject_type(name, "true or false");
  return value.get_bool();
}

std::string_view read_text(std::string_view name, const json::value& value) {
  if (!value.is_string()) reject_type(name, "a string");
  return view(value.get_string());
}

double read_number(std::string_view name, const json::value& value, double low, double high,
                   const char* range) {
  if (!value.is_number()) reject_type(name, "a number");
  const auto number = value.to_number<double>();
  if (!(number >= low && number <= high)) {  // NaN fails too
    reject(name, "'" + std::string(name) + "' must be " + range + ".");
  }
  return number;
}

int64_t read_integer(std::string_view name, const json::value& value) {
  if (value.is_int64()) return value.get_int64();
  if (value.is_uint64()) {
    constexpr auto kMax = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    return static_cast<int64_t>(std::min(value.get_uint64(), kMax));
  }
  if (!value.is_double()) reject_type(name, "an integer");
  const double number = value.get_double();
  if (std::trunc(number) != number) reject_type(name, "an integer");  // NaN too
  if (std::abs(number) >= 0x1p63) reject_type(name, "an integer of at most 64 bits");
  return static_cast<int64_t>(number);
}

int64_t read_integer_between(std::string_view name, const json::value& value, int64_t low,
                             int64_t high) {
  const int64_t number = read_integer(name, value);
  if (number < low || number > high) {
    reject(name, "'" + std::string(name) + "' must be between " + std::to_string(low) + " and " +
                     std::to_string(high) + ".");
  }
  return number;
}

uint32_t read_token_id(std::string_view name, const json::value& value, uint32_t vocab_size) {
  const int64_t id = read_integer(name, value);
  if (id < 0 || id >= vocab_size) {
    reject(name, "'" + std::string(name) + "' holds token id " + std::to_string(id) +
                     "; ids of this model are 0.." + std::to_string(vocab_size - 1) + ".");
  }
  return static_cast<uint32_t>(id);
}

}  // namespace blink
