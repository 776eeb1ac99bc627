// A file that the operator names, read whole.
#ifndef BLINK_FRONTEND_SMALL_FILE_H
#define BLINK_FRONTEND_SMALL_FILE_H

#include <string>

namespace blink {

// Reads once, so that a pipe will do. Throws std::runtime_error: "PATH: why", also past 1 MiB.
std::string read_small_file(const std::string& path);

}  // namespace blink

#endif  // BLINK_FRONTEND_SMALL_FILE_H
