// The built-in chat page: chat_page.html, carried inside the binary.
#ifndef BLINK_FRONTEND_CHAT_PAGE_H
#define BLINK_FRONTEND_CHAT_PAGE_H

#include <string_view>

namespace blink {

std::string_view chat_page();

}  // namespace blink

#endif  // BLINK_FRONTEND_CHAT_PAGE_H
