// Parameters that this server does not implement, and the values under which they change nothing.
#ifndef BLINK_FRONTEND_NEUTRAL_FIELDS_H
#define BLINK_FRONTEND_NEUTRAL_FIELDS_H

#include <string_view>

#include <boost/json/value.hpp>

namespace blink {

enum class Neutrality {
  neutral,        // the value changes nothing
  unsupported,    // a known parameter, a value that would change the output
  unconstrained,  // asks for output that follows a grammar
  unknown,        // not a parameter of this API
};

// Tells whether the parameter is about tools, which only chats have.
bool speaks_of_tools(std::string_view name);

// null is neutral for every known or unknown field.
Neutrality judge_field(std::string_view name, const boost::json::value& value);

}  // namespace blink

#endif  // BLINK_FRONTEND_NEUTRAL_FIELDS_H
