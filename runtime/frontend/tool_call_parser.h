// Finds calls of tools in streamed text: pieces of output text -> content and calls, as early as
// they are certain.
#ifndef BLINK_FRONTEND_TOOL_CALL_PARSER_H
#define BLINK_FRONTEND_TOOL_CALL_PARSER_H

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace blink {

enum class ToolFormat : uint8_t {
  none,
  hermes,  // <tool_call>{"name": ..., "arguments": {...}}</tool_call>, among content
  llama3,  // the whole answer is {"name": ..., "parameters": {...}}, several separated by ";"
};

struct ToolPiece {
  enum class Kind : uint8_t {
    content,     // text for the client
    call_begin,  // text: the function's name
    arguments,   // text: the next piece of the call's arguments, JSON
    call_end,    // the arguments are whole
    call_lost,   // what began as a call is none; text: all of it, as the model wrote it
  };
  Kind kind;
  std::string text;
};

// How text is cut into pieces changes nothing but where content and arguments are cut. A call is an
// object with the name of a known function and, at most once, its arguments (or parameters), an
// object; "type" and "id" may stand beside them. Whatever is no such object ends the search: it and
// all that follows is content. White space around calls is dropped. Linear time.
class ToolCallParser {
 public:
  ToolCallParser(ToolFormat format, std::vector<std::string> names, bool calls_in_parallel);
  ~ToolCallParser();
  ToolCallParser(ToolCallParser&&) noexcept;
  ToolCallParser& operator=(ToolCallParser&&) noexcept;

  void feed(std::string_view text, std::vector<ToolPiece>& out);
  // The end of the text: what was held back is content.
  void finish(std::vector<ToolPiece>& out);

  uint32_t num_whole_calls() const { return num_whole_calls_; }
  // One call was all that may come, and it is whole: nothing that follows counts.
  bool is_full() const { return is_full_; }

 private:
  class CallObject;

  void scan(char byte, std::vector<ToolPiece>& out);
  void scan_hermes(char byte, std::vector<ToolPiece>& out);
  void scan_llama3(char byte, std::vector<ToolPiece>& out);
  void scan_call(char byte, std::vector<ToolPiece>& out);
  void begin_call();
  void lose_call(std::vector<ToolPiece>& out);
  void end_call(std::vector<ToolPiece>& out);
  void release_held(std::vector<ToolPiece>& out);
  void emit_content(std::string_view text, std::vector<ToolPiece>& out);

  ToolFormat format_;
  std::vector<std::string> names_;
  bool calls_in_parallel_;
  bool is_plain_ = false;  // no more calls: all is content
  bool is_full_ = false;
  bool is_after_call_ = false;  // only white space since the last call
  bool may_close_ = false;      // hermes: </tool_call> may come; llama3: ";" may come
  uint32_t num_whole_calls_ = 0;
  std::string_view tag_;    // the tag being matched
  size_t num_matched_ = 0;  // bytes of it
  std::string spaces_;      // white space that may stand before a call
  std::string raw_;         // of the call under way: all its bytes, with what stood before it
  std::unique_ptr<CallObject> call_;
};

}  // namespace blink

#endif  // BLINK_FRONTEND_TOOL_CALL_PARSER_H
