// A failed call: what kind it is (the numbers of moe_a2a/errors.py) and a sentence for the user.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace moe_a2a {

enum class FailureKind : int {
  BAD_VALUE = 1,
  BAD_TYPE = 2,
  PEER_ABORTED = 3,
  CALL_MISMATCH = 4,
  PAD_TOO_SMALL = 5,
  PEER_LOST = 6,
  PEER_TIMEOUT = 7,
  GROUP_POISONED = 8,
  GROUP_CLOSED = 9,
  HANDLE_EXPIRED = 10,
  OUT_OF_MEMORY = 11,
  TRANSPORT_UNAVAILABLE = 12,
  WINDOW_BUSY = 13,
  GROUP_BUSY = 14,
  INTERRUPTED = 99,
};

struct Failure : std::runtime_error {
  Failure(FailureKind kind, const std::string& text) : std::runtime_error(text), kind(kind) {}
  FailureKind kind;
};

[[gnu::format(printf, 1, 2)]] inline std::string say(const char* format, ...) {
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  const int size = std::vsnprintf(nullptr, 0, format, args);
  va_end(args);
  std::string text(static_cast<size_t>(size), '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, again);
  va_end(again);
  return text;
}

}  // namespace moe_a2a
