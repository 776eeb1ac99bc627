// For test_tool_calls.py: each line on stdin is a JSON object {"format", "names", "parallel",
// "pieces"}; the answer is a line with the parser's pieces, [[kind, text], ...].
#include <iostream>
#include <string>
#include <vector>

#include <boost/json.hpp>

#include "frontend/tool_call_parser.h"

namespace {

namespace json = boost::json;

const char* name_of(blink::ToolPiece::Kind kind) {
  switch (kind) {
    case blink::ToolPiece::Kind::content:
      return "content";
    case blink::ToolPiece::Kind::call_begin:
      return "call_begin";
    case blink::ToolPiece::Kind::arguments:
      return "arguments";
    case blink::ToolPiece::Kind::call_end:
      return "call_end";
    case blink::ToolPiece::Kind::call_lost:
      return "call_lost";
  }
  return "";
}

json::array answer(const json::object& request) {
  const bool is_hermes = request.at("format").as_string() == "hermes";
  std::vector<std::string> names;
  for (const json::value& name : request.at("names").as_array()) {
    names.emplace_back(name.as_string().c_str());
  }
  blink::ToolCallParser parser(is_hermes ? blink::ToolFormat::hermes : blink::ToolFormat::llama3,
                               names, request.at("parallel").as_bool());
  std::vector<blink::ToolPiece> pieces;
  for (const json::value& piece : request.at("pieces").as_array()) {
    const json::string& text = piece.as_string();
    parser.feed({text.data(), text.size()}, pieces);
  }
  parser.finish(pieces);
  json::array out;
  for (const blink::ToolPiece& piece : pieces) {
    out.push_back(json::array{name_of(piece.kind), piece.text});
  }
  return out;
}

}  // namespace

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::cout << json::serialize(answer(json::parse(line).as_object())) << std::endl;
  }
  return 0;
}
