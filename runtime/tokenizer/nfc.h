// Canonical composition (Unicode NFC), over the tables of the `tokenizers` library.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace blink {

struct NfcScratch {
  std::vector<uint64_t> marks;  // combining class << 56 | position << 24 | code point
  std::vector<uint32_t> chars;
};

// Length of the longest prefix that NFC leaves as it is whatever follows it, cut so that the last
// character, which a following mark could change, is not in it. `text.size()` if all is in NFC.
size_t nfc_prefix_bytes(std::string_view text);

// Writes the NFC form of `text` to `out`. Ill-formed bytes stay what they are.
void normalize_nfc(std::string_view text, NfcScratch& scratch, std::string& out);

}  // namespace blink
