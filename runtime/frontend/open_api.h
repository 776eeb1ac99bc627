// The description of the API that /openapi.json gives: open_api.json, carried inside the binary.
#ifndef BLINK_FRONTEND_OPEN_API_H
#define BLINK_FRONTEND_OPEN_API_H

#include <string_view>

namespace blink {

std::string_view open_api();

}  // namespace blink

#endif  // BLINK_FRONTEND_OPEN_API_H
