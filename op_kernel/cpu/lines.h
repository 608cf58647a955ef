// Data as flag: bytes cut in lines of 512, each 480 of payload and a code block. A line proves itself, whatever order the link
// delivers lines in.
//
// Example: 500 bytes in call 7 take two lines; bytes 0..479 stand at 0, bytes 480..499 at 512, and the code 7 (eight int32) at
// 480 and at 992.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "flag.h"
#include "layout.h"

namespace moe_a2a {

inline void put_lines(char* to, const char* from, int64_t bytes, uint64_t code) {
  const Flags flags(false);
  for (int64_t at = 0; at < bytes; at += LINE_PAYLOAD, to += LINE) {
    if (dropped(Rule::PAYLOAD_BEFORE_LINE_CODE)) {
      flags.store(to + LINE_PAYLOAD, code);
      at_point("line code");
    }
    std::memcpy(to, from + at, static_cast<size_t>(std::min<int64_t>(LINE_PAYLOAD, bytes - at)));
    at_point("line payload");
    flags.store(to + LINE_PAYLOAD, code);
  }
}

inline bool lines_hold(const char* at, int64_t bytes, uint64_t code) {
  const Flags flags(false);
  for (int64_t line = 0; line < lines_for(bytes); ++line)
    if (!flags.holds(at + line * LINE + LINE_PAYLOAD, code)) return false;
  return true;
}

// bytes [begin, begin + bytes) of what the lines at `lines` carry.
inline void get_lines(char* to, const char* lines, int64_t begin, int64_t bytes) {
  for (int64_t done = 0; done < bytes;) {
    const int64_t inside = (begin + done) % LINE_PAYLOAD;
    const int64_t step = std::min(LINE_PAYLOAD - inside, bytes - done);
    std::memcpy(to + done, lines + (begin + done) / LINE_PAYLOAD * LINE + inside, static_cast<size_t>(step));
    done += step;
  }
}

inline void clear_lines(char* at, int64_t bytes) {
  const Flags flags(false);
  for (int64_t line = 0; line < lines_for(bytes); ++line) flags.clear(at + line * LINE + LINE_PAYLOAD);
}

}  // namespace moe_a2a
