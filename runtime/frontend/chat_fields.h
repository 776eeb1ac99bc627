// The parameters of a chat that its template sees: messages and tools, made fit for templates.
#ifndef BLINK_FRONTEND_CHAT_FIELDS_H
#define BLINK_FRONTEND_CHAT_FIELDS_H

#include <string>
#include <vector>

#include <boost/json/array.hpp>
#include <boost/json/value.hpp>

namespace blink {

// Text parts become one string and the arguments of earlier calls objects: what templates expect.
// Throws Rejected.
boost::json::array read_messages(const boost::json::value& value);

// Checks a list of functions; returns their names. Throws Rejected.
std::vector<std::string> read_tools(const boost::json::value& value);

// True: calls may be made ("auto"). Throws Rejected for what would need constrained decoding.
bool read_tool_choice(const boost::json::value& value);

}  // namespace blink

#endif  // BLINK_FRONTEND_CHAT_FIELDS_H
