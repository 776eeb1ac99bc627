#include "frontend/chat_fields.h"

#include <algorithm>
#include <utility>

#include <boost/json/parse.hpp>

#include "frontend/field_reader.h"

namespace blink {
namespace {

namespace json = boost::json;

constexpr size_t kMaxTools = 128;
constexpr size_t kMaxNameBytes = 64;

std::string item_name(std::string_view list, size_t index) {
  return std::string(list) + "[" + std::to_string(index) + "]";
}

std::string text_of_parts(const std::string& name, const json::array& parts) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string part_name = item_name(name + ".content", i);
    if (!parts[i].is_object()) reject_type(part_name, "an object");
    const json::object& part = parts[i].get_object();
    const json::value* type = part.if_contains("type");
    if (type == nullptr || !type->is_string()) reject_type(part_name + ".type", "a string");
    if (type->get_string() != "text") {
      reject(part_name + ".type",
             "Content parts of type '" + shortened(view(type->get_string())) +
                 "' are not supported; this model takes text.",
             "unsupported_parameter");
    }
    const json::value* part_text = part.if_contains("text");
    if (part_text == nullptr) reject_type(part_name + ".text", "a string");
    text += read_text(part_name + ".text", *part_text);
  }
  return text;
}

void read_content(const std::string& name, json::object& message) {
  json::value* content = message.if_contains("content");
  const bool may_lack = message.contains("tool_calls") || message.contains("function_call");
  if (content == nullptr || content->is_null()) {
    if (!may_lack) reject_type(name + ".content", "a string or a list of text parts");
    message["content"] = "";
    return;
  }
  if (content->is_string()) return;
  if (!content->is_array()) reject_type(name + ".content", "a string or a list of text parts");
  const std::string text = text_of_parts(name, content->get_array());
  *content = json::string(text.data(), text.size());
}

// A call's arguments come as JSON text, and templates write them as JSON themselves. Text that is
// no object stays what it is: the model wrote it, and the template may still show it.
void read_earlier_calls(const std::string& name, json::object& message) {
  json::value* calls = message.if_contains("tool_calls");
  if (calls == nullptr) return;
  if (calls->is_null() || (calls->is_array() && calls->get_array().empty())) {
    message.erase("tool_calls");  // templates ask whether it is there
    return;
  }
  if (!calls->is_array()) reject_type(name + ".tool_calls", "a list of calls");
  json::array& list = calls->get_array();
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string call_name = item_name(name + ".tool_calls", i);
    json::value* function = nullptr;
    if (list[i].is_object()) function = list[i].get_object().if_contains("function");
    if (function == nullptr || !function->is_object()) {
      reject_type(call_name + ".function", "an object");
    }
    json::object& fields = function->get_object();
    const json::value* called = fields.if_contains("name");
    if (called == nullptr) reject_type(call_name + ".function.name", "a string");
    read_text(call_name + ".function.name", *called);
    json::value* arguments = fields.if_contains("arguments");
    if (arguments == nullptr) {
      fields["arguments"] = json::object();
      continue;
    }
    if (arguments->is_object()) continue;
    const std::string text(read_text(call_name + ".function.arguments", *arguments));
    boost::system::error_code code;
    json::value parsed = json::parse(text, code);
    if (!code && parsed.is_object()) *arguments = std::move(parsed);
  }
}

}  // namespace

json::array read_messages(const json::value& value) {
  if (!value.is_array()) reject_type("messages", "a list of messages");
  const json::array& list = value.get_array();
  if (list.empty()) reject("messages", "'messages' is empty.");
  json::array messages;
  messages.reserve(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string name = item_name("messages", i);
    if (!list[i].is_object()) reject_type(name, "an object");
    json::object message = list[i].get_object();
    const json::value* role = message.if_contains("role");
    if (role == nullptr || !role->is_string() || role->get_string().empty()) {
      reject_type(name + ".role", "a string");
    }
    read_content(name, message);
    read_earlier_calls(name, message);
    messages.push_back(std::move(message));
  }
  return messages;
}

std::vector<std::string> read_tools(const json::value& value) {
  if (!value.is_array()) reject_type("tools", "a list of tools");
  const json::array& list = value.get_array();
  if (list.size() > kMaxTools) {
    reject("tools", "'tools' holds " + std::to_string(list.size()) + " tools; at most " +
                        std::to_string(kMaxTools) + " are allowed.");
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string name = item_name("tools", i);
    if (!list[i].is_object()) reject_type(name, "an object");
    const json::object& tool = list[i].get_object();
    const json::value* type = tool.if_contains("type");
    if (type == nullptr || read_text(name + ".type", *type) != "function") {
      reject(name + ".type",
             "'" + name + ".type' must be 'function': other tools do not exist here.",
             "unsupported_parameter");
    }
    const json::value* function = tool.if_contains("function");
    if (function == nullptr || !function->is_object()) reject_type(name + ".function", "an object");
    const json::value* called = function->get_object().if_contains("name");
    if (called == nullptr) reject_type(name + ".function.name", "a string");
    const std::string_view text = read_text(name + ".function.name", *called);
    if (text.empty() || text.size() > kMaxNameBytes) {
      reject(name + ".function.name", "'" + name + ".function.name' must have 1 to 64 bytes.");
    }
    const json::value* strict = function->get_object().if_contains("strict");
    if (strict != nullptr && strict->is_bool() && strict->get_bool()) {
      reject(name + ".function.strict",
             "'" + name +
                 ".function.strict' is not supported: output is not constrained by a "
                 "grammar here. Leave it out and check the arguments.",
             "unsupported_parameter");
    }
    names.emplace_back(text);
  }
  return names;
}

bool read_tool_choice(const json::value& value) {
  if (value.is_string()) {
    const std::string_view choice = view(value.get_string());
    if (choice == "auto") return true;
    if (choice == "none") return false;
  }
  if (!value.is_string() && !value.is_object()) reject_type("tool_choice", "a string or an object");
  reject_unsupported(
      "tool_choice",
      "must be 'auto' or 'none': a call cannot be forced, as output is not "
      "constrained by a grammar here. Use 'auto' and ask for the call in a message.");
}

}  // namespace blink
