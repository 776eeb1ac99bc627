#include "frontend/neutral_fields.h"

#include <algorithm>
#include <array>
#include <string>

namespace blink {
namespace {

namespace json = boost::json;

bool is_false(const json::value& v) { return v.is_bool() && !v.get_bool(); }
bool is_true(const json::value& v) { return v.is_bool() && v.get_bool(); }
bool is_never(const json::value&) { return false; }
bool is_bool(const json::value& v) { return v.is_bool(); }
bool is_object(const json::value& v) { return v.is_object(); }
bool is_text(const json::value& v) { return v.is_string(); }
bool is_number(const json::value& v, double expected) {
  return v.is_number() && v.to_number<double>() == expected;
}
bool is_zero(const json::value& v) { return is_number(v, 0); }
bool is_one(const json::value& v) { return is_number(v, 1); }
bool is_empty_text(const json::value& v) { return v.is_string() && v.get_string().empty(); }
bool is_empty_array(const json::value& v) { return v.is_array() && v.get_array().empty(); }
bool is_empty_object(const json::value& v) { return v.is_object() && v.get_object().empty(); }
bool is_no_tool(const json::value& v) {
  return v.is_string() && (v.get_string() == "none" || v.get_string() == "auto");
}
bool is_text_format(const json::value& v) {
  if (!v.is_object()) return false;
  const json::object& format = v.get_object();
  const json::value* type = format.if_contains("type");
  return format.size() == 1 && type != nullptr && type->is_string() && type->get_string() == "text";
}
bool is_text_modality(const json::value& v) {
  return v.is_array() && v.get_array().size() == 1 && v.get_array()[0].is_string() &&
         v.get_array()[0].get_string() == "text";
}
bool is_default_tier(const json::value& v) {
  return v.is_string() && (v.get_string() == "auto" || v.get_string() == "default");
}

struct NeutralField {
  std::string_view name;
  bool (*is_neutral)(const json::value&);
};

constexpr std::array kNeutralFields = {
    // OpenAI
    NeutralField{"echo", is_false},
    NeutralField{"suffix", is_empty_text},
    NeutralField{"top_logprobs", is_zero},
    NeutralField{"tools", is_empty_array},
    NeutralField{"tool_choice", is_no_tool},
    NeutralField{"parallel_tool_calls", is_bool},  // speaks of tools only; completions have none
    NeutralField{"functions", is_empty_array},
    NeutralField{"function_call", is_no_tool},
    NeutralField{"response_format", is_text_format},
    NeutralField{"modalities", is_text_modality},
    NeutralField{"service_tier", is_default_tier},
    NeutralField{"store", is_false},
    NeutralField{"metadata", is_object},
    NeutralField{"user", is_text},
    NeutralField{"safety_identifier", is_text},
    NeutralField{"prompt_cache_key", is_text},
    NeutralField{"audio", is_never},
    NeutralField{"prediction", is_empty_object},
    NeutralField{"reasoning_effort", is_empty_text},
    NeutralField{"verbosity", is_empty_text},
    NeutralField{"web_search_options", is_never},  // empty: search with the defaults
    // Widespread extensions
    NeutralField{"length_penalty", is_one},
    NeutralField{"use_beam_search", is_false},
    NeutralField{"early_stopping", is_false},
    NeutralField{"typical_p", is_one},
    NeutralField{"include_stop_str_in_output", is_false},
    NeutralField{"spaces_between_special_tokens", is_true},
    NeutralField{"continue_final_message", is_false},
    NeutralField{"detokenize", is_true},
    NeutralField{"priority", is_zero},
    NeutralField{"request_id", is_text},
    NeutralField{"documents", is_empty_array},
    NeutralField{"bad_words", is_empty_array},
    NeutralField{"return_token_ids", is_false},
    NeutralField{"prompt_logprobs", is_false},
};

// What would need output that follows a grammar.
constexpr std::array<std::string_view, 10> kGrammarFields = {
    "response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "json_schema",     "regex",       "ebnf",         "grammar",       "structured_outputs"};

constexpr std::array<std::string_view, 5> kToolFields = {
    "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"};

}  // namespace

bool speaks_of_tools(std::string_view name) {
  return std::find(kToolFields.begin(), kToolFields.end(), name) != kToolFields.end();
}

Neutrality judge_field(std::string_view name, const json::value& value) {
  if (value.is_null()) return Neutrality::neutral;
  for (const NeutralField& field : kNeutralFields) {
    if (field.name != name) continue;
    if (field.is_neutral(value)) return Neutrality::neutral;
    break;
  }
  if (std::find(kGrammarFields.begin(), kGrammarFields.end(), name) != kGrammarFields.end()) {
    return Neutrality::unconstrained;
  }
  for (const NeutralField& field : kNeutralFields) {
    if (field.name == name) return Neutrality::unsupported;
  }
  return Neutrality::unknown;
}

}  // namespace blink
