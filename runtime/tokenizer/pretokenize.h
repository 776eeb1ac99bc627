// Cuts text into the pieces that the split patterns of tokenizers make, without a regex engine.
//
// Each `*_end` function takes the start of a piece and returns its end; `end` is the end of the
// text that the pattern sees. Every pattern tries its alternatives in order, and the comments name
// them.
#pragma once

#include <cstdint>
#include <string_view>

#include "blob.h"
#include "runs.h"

namespace blink::pretokenize {

// 's|'t|'re|'ve|'m|'ll|'d at `p`: its end, or `p`. Ignoring case lets the long s (U+017F) be an s.
template <bool kIgnoreCase>
inline Bytes contraction_end(Bytes p, Bytes end) {
  if (end - p < 2 || *p != '\'') return p;
  const auto lower = [](uint8_t b) {
    return kIgnoreCase && b >= 'A' && b <= 'Z' ? static_cast<uint8_t>(b | 0x20) : b;
  };
  const uint8_t b1 = lower(p[1]);
  if (b1 == 's' || b1 == 't' || b1 == 'm' || b1 == 'd') return p + 2;
  if (end - p < 3) return p;
  const uint8_t b2 = lower(p[2]);
  if ((b1 == 'r' && b2 == 'e') || (b1 == 'v' && b2 == 'e') || (b1 == 'l' && b2 == 'l')) {
    return p + 3;
  }
  if (kIgnoreCase && p[1] == 0xC5 && p[2] == 0xBF) return p + 3;
  return p;
}

// \s*[\r\n]+|\s+(?!\S)|\s+ or, without kNewlines, \s+(?!\S)|\s+; the character at `p` is white
// space.
template <bool kNewlines>
inline Bytes space_end(const Runs& runs, Bytes p, Bytes end) {
  const Bytes q = runs.spaces_end(p, end);
  if (kNewlines) {
    if (const Bytes r = runs.last_newline_end(p, q); r != p) return r;
  }
  if (q == end) return q;
  // Before a character that is not white space, the last one is left to the next piece.
  const Bytes last = unicode::previous(q, p);
  return last == p ? q : last;
}

// Up to three characters of \p{N}; there is one at `p`.
inline Bytes three_numbers_end(Bytes p, Bytes end) {
  for (int i = 0; i < 3 && p < end; ++i) {
    const Classified c = classify(p, end);
    if ((c.bits & unicode::kNumber) == 0) break;
    p += c.num_bytes;
  }
  return p;
}

// 's|...| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
inline Bytes gpt2_end(const Runs& runs, Bytes p, Bytes end) {
  if (const Bytes q = contraction_end<false>(p, end); q != p) return q;
  Classified c = classify(p, end);
  Bytes q = p + c.num_bytes;
  if (*p == ' ' && q < end) {
    c = classify(q, end);
    q += c.num_bytes;
  }
  if ((c.bits & unicode::kLetter) != 0) return runs.letters_end(q, end);
  if ((c.bits & unicode::kNumber) != 0) return Runs::run_end(q, end, unicode::kNumber);
  if ((c.bits & unicode::kSpace) == 0) return runs.others_end(q, end);
  return space_end<false>(runs, p, end);
}

// Llama-3's pattern, and with kSingleNumbers Qwen's.
template <bool kSingleNumbers>
inline Bytes llama3_end(const Runs& runs, Bytes p, Bytes end) {
  // (?i:'s|'t|'re|'ve|'m|'ll|'d)
  if (const Bytes q = contraction_end<true>(p, end); q != p) return q;
  const Classified c = classify(p, end);
  Bytes q = p + c.num_bytes;
  // [^\r\n\p{L}\p{N}]?\p{L}+
  if ((c.bits & unicode::kLetter) != 0) return runs.letters_end(q, end);
  if ((c.bits & unicode::kNumber) != 0) {  // \p{N}{1,3} or \p{N}
    return kSingleNumbers ? q : three_numbers_end(p, end);
  }
  Classified next{0, 0};
  if (q < end) {
    next = classify(q, end);
    if ((next.bits & unicode::kLetter) != 0 && !is_newline(*p)) {
      return runs.letters_end(q + next.num_bytes, end);
    }
  }
  //  ?[^\s\p{L}\p{N}]+[\r\n]*
  const bool other_follows = *p == ' ' && q < end && (next.bits & kNotOther) == 0;
  if ((c.bits & unicode::kSpace) == 0 || other_follows) {
    q = runs.others_end(q, end);
    while (q < end && is_newline(*q)) ++q;
    return q;
  }
  return space_end<true>(runs, p, end);
}

// The two letter alternatives of o200k without their prefix: either or `p`.
//   [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+   (kNeedsLower)
//   [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*
template <bool kNeedsLower>
inline Bytes o200k_word_end(Bytes p, Bytes end) {
  constexpr uint16_t kBoth = unicode::kOtherLetter | unicode::kMark;
  Bytes q = p;
  Bytes after_both = p;  // end of the last character that is in both classes
  while (q < end) {
    const Classified c = classify(q, end);
    if ((c.bits & (unicode::kUpper | kBoth)) == 0) break;
    q += c.num_bytes;
    if ((c.bits & kBoth) != 0) after_both = q;
  }
  const Bytes lower_end = Runs::run_end(q, end, unicode::kLower | kBoth);
  if (!kNeedsLower || lower_end != q) return lower_end;
  // No lower-case letter follows: the first class gives characters back until one is in the second,
  // and what stood after that one is not.
  return after_both;
}

// o200k's pattern, or with kTekken that of Mistral's Tekken.
template <bool kTekken>
inline Bytes o200k_end(const Runs& runs, Bytes p, Bytes end) {
  const Classified c = classify(p, end);
  const Bytes after = p + c.num_bytes;
  const bool may_prefix =
      (c.bits & (unicode::kLetter | unicode::kNumber)) == 0 && !is_newline(*p) && after < end;
  const auto with_contraction = [end](Bytes q) {
    return kTekken ? q : contraction_end<true>(q, end);
  };
  if (may_prefix) {
    if (const Bytes q = o200k_word_end<true>(after, end); q != after) return with_contraction(q);
  }
  if (const Bytes q = o200k_word_end<true>(p, end); q != p) return with_contraction(q);
  if (may_prefix) {
    if (const Bytes q = o200k_word_end<false>(after, end); q != after) return with_contraction(q);
  }
  if (const Bytes q = o200k_word_end<false>(p, end); q != p) return with_contraction(q);
  if ((c.bits & unicode::kNumber) != 0) return kTekken ? after : three_numbers_end(p, end);
  //  ?[^\s\p{L}\p{N}]+[\r\n/]*
  const bool other_follows =
      *p == ' ' && after < end && (classify(after, end).bits & kNotOther) == 0;
  if ((c.bits & unicode::kSpace) == 0 || other_follows) {
    Bytes q = runs.others_end(after, end);
    while (q < end && (is_newline(*q) || *q == '/')) ++q;
    return q;
  }
  return space_end<true>(runs, p, end);
}

inline bool is_ascii_letter(uint8_t b) { return (b | 0x20) >= 'a' && (b | 0x20) <= 'z'; }
inline bool is_ascii_punctuation(uint8_t b) {
  return b > 0x20 && b < 0x7F && !is_ascii_letter(b) && (b < '0' || b > '9');
}

// DeepSeek-V3's third pattern at `p`: the end of the match, or `p` where there is none.
inline Bytes deepseek_match_end(const Runs& runs, Bytes p, Bytes end) {
  constexpr uint16_t kWordChar = unicode::kLetter | unicode::kMark;
  constexpr uint16_t kSign = unicode::kPunctuation | unicode::kSymbol;
  // [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+
  if (is_ascii_punctuation(*p) && end - p > 1 && is_ascii_letter(p[1])) {
    Bytes q = p + 2;
    while (q < end && is_ascii_letter(*q)) ++q;
    return q;
  }
  const Classified c = classify(p, end);
  Bytes q = p + c.num_bytes;
  // [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
  if ((c.bits & (unicode::kLetter | kSign)) == 0 && !is_newline(*p)) {
    if (const Bytes r = Runs::run_end(q, end, kWordChar); r != q) return r;
  }
  if ((c.bits & kWordChar) != 0) return Runs::run_end(q, end, kWordChar);
  //  ?[\p{P}\p{S}]+[\r\n]*
  const bool sign_follows = *p == ' ' && q < end && (classify(q, end).bits & kSign) != 0;
  if ((c.bits & kSign) != 0 || sign_follows) {
    q = Runs::run_end(q, end, kSign);
    while (q < end && is_newline(*q)) ++q;
    return q;
  }
  if ((c.bits & unicode::kSpace) != 0) return space_end<true>(runs, p, end);
  return p;
}

// What no alternative matches is a piece too, up to the next match.
inline Bytes deepseek_end(const Runs& runs, Bytes p, Bytes end) {
  Bytes q = deepseek_match_end(runs, p, end);
  if (q != p) return q;
  do {
    q += classify(q, end).num_bytes;
  } while (q < end && deepseek_match_end(runs, q, end) == q);
  return q;
}

// [\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]
inline bool is_deepseek_cjk(uint32_t c) {
  return (c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF);
}

// Calls emit(begin, end) for each piece between `p` and `end`.
template <typename Emit>
inline void split_deepseek(const Runs& runs, Bytes p, Bytes end, Emit&& emit) {
  while (p < end) {
    if ((classify(p, end).bits & unicode::kNumber) != 0) {
      const Bytes q = three_numbers_end(p, end);
      emit(p, q);
      p = q;
      continue;
    }
    // A run that is all CJK or all not, and without numbers: the third pattern sees no further.
    Bytes stop = p;
    const bool cjk = is_deepseek_cjk(unicode::decode(p, end).code_point);
    while (stop < end) {
      const unicode::Decoded d = unicode::decode(stop, end);
      if ((unicode::class_of(d.code_point) & unicode::kNumber) != 0) break;
      if (is_deepseek_cjk(d.code_point) != cjk) break;
      stop += d.num_bytes;
    }
    while (p < stop) {
      const Bytes q = deepseek_end(runs, p, stop);
      emit(p, q);
      p = q;
    }
  }
}

template <typename Emit>
inline void split_digits_gpt2(const Runs& runs, Bytes p, Bytes end, Emit&& emit) {
  while (p < end) {
    const Bytes digit = Runs::run_end_without(p, end, unicode::kNumeric);
    while (p < digit) {
      const Bytes q = gpt2_end(runs, p, digit);
      emit(p, q);
      p = q;
    }
    if (p < end) {
      const Bytes q = p + classify(p, end).num_bytes;
      emit(p, q);
      p = q;
    }
  }
}

template <typename End, typename Emit>
inline void split_with(const Runs& runs, Bytes p, Bytes end, End&& piece_end, Emit&& emit) {
  while (p < end) {
    const Bytes q = piece_end(runs, p, end);
    emit(p, q);
    p = q;
  }
}

// Calls emit(begin, end) for each piece of `text`, in order; the pieces cover it. `masks` is memory
// to work in.
template <typename Emit>
inline void split(PretokenizerKind kind, std::string_view text, TextMasks& masks, Emit&& emit) {
  const auto p = reinterpret_cast<Bytes>(text.data());
  const Bytes end = p + text.size();
  if (kind != PretokenizerKind::kWhole) masks.assign(text);
  const Runs runs(text, masks);
  switch (kind) {
    case PretokenizerKind::kGpt2:
      return split_with(runs, p, end, gpt2_end, emit);
    case PretokenizerKind::kDigitsGpt2:
      return split_digits_gpt2(runs, p, end, emit);
    case PretokenizerKind::kLlama3:
      return split_with(runs, p, end, llama3_end<false>, emit);
    case PretokenizerKind::kQwen:
      return split_with(runs, p, end, llama3_end<true>, emit);
    case PretokenizerKind::kO200k:
      return split_with(runs, p, end, o200k_end<false>, emit);
    case PretokenizerKind::kDeepSeekV3:
      return split_deepseek(runs, p, end, emit);
    case PretokenizerKind::kTekken:
      return split_with(runs, p, end, o200k_end<true>, emit);
    case PretokenizerKind::kWhole:
      if (p < end) emit(p, end);
      return;
  }
}

}  // namespace blink::pretokenize
