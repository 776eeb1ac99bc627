// Reads single values of a request body; whatever is wrong is thrown as Rejected, which names the
// parameter.
#ifndef BLINK_FRONTEND_FIELD_READER_H
#define BLINK_FRONTEND_FIELD_READER_H

#include <cstdint>
#include <string>
#include <string_view>

#include <boost/json/value.hpp>

#include "frontend/api_error.h"

namespace blink {

// Thrown while a request is parsed only, and turned into a result at the parser's edge.
struct Rejected {
  ApiError error;
};

[[noreturn]] void reject(std::string_view param, std::string message,
                         std::string code = "invalid_value");
// "'param' must be `expected`."
[[noreturn]] void reject_type(std::string_view param, const char* expected);
// Of a parameter that is known and would change the output: what happens instead is in `message`.
[[noreturn]] void reject_unsupported(std::string_view param, std::string message);

std::string_view view(const boost::json::string& text);
bool read_bool(std::string_view name, const boost::json::value& value);
std::string_view read_text(std::string_view name, const boost::json::value& value);
// `range` completes "must be ...". NaN is out of every range.
double read_number(std::string_view name, const boost::json::value& value, double low, double high,
                   const char* range);
// Integers only; 3.0 is taken as 3, as many clients send every number as a double.
int64_t read_integer(std::string_view name, const boost::json::value& value);
int64_t read_integer_between(std::string_view name, const boost::json::value& value, int64_t low,
                             int64_t high);
uint32_t read_token_id(std::string_view name, const boost::json::value& value, uint32_t vocab_size);

}  // namespace blink

#endif  // BLINK_FRONTEND_FIELD_READER_H
