// Codes: the epoch that says "what stands before me is complete". Written with release after what they guard, read with
// acquire before it. Compared with ==, never with <: a code that wrapped is smaller than the one before it.
//
// Example (compact): store_code(p, 7) makes the u64 at p 7; holds_code(p, 7) is true, holds_code(p, 6) is false.
// Example (portable): store_code(p, 7) makes the eight int32 at p 7 7 7 7 7 7 7 7; a block in which one of them is still 5
// holds neither code.
//
// A code can carry a refusal: refusal(7) lies outside 1..V, so whoever waits for 7 can tell "no" from "not yet".
#pragma once

#include <atomic>
#include <cstdint>

#include "layout.h"

namespace moe_a2a {

constexpr int BLOCK_WORDS = 8;
constexpr uint64_t REFUSED_BIT = uint64_t{1} << 63;

inline void store_u64(void* at, uint64_t value) {
  std::atomic_ref<uint64_t>(*static_cast<uint64_t*>(at)).store(value, std::memory_order_release);
}
inline uint64_t load_u64(const void* at) {
  return std::atomic_ref<uint64_t>(*static_cast<uint64_t*>(const_cast<void*>(at))).load(std::memory_order_acquire);
}

class Flags {
 public:
  // compact: one u64; else a block of eight int32.
  explicit Flags(bool compact) : compact_(compact) {}

  void store(char* at, uint64_t code) const {
    if (compact_) return store_u64(at, code);
    store_block(at, static_cast<int32_t>(code));
  }
  void store_refusal(char* at, uint64_t code) const {
    if (compact_) return store_u64(at, code | REFUSED_BIT);
    store_block(at, -static_cast<int32_t>(code));
  }
  bool holds(const char* at, uint64_t code) const {
    if (dropped(Rule::CODES_COMPARE_EQUAL)) return static_cast<uint64_t>(value(at)) >= code;
    if (compact_) return load_u64(at) == code;
    return block_equals(at, static_cast<int32_t>(code));
  }
  bool holds_refusal(const char* at, uint64_t code) const {
    if (compact_) return load_u64(at) == (code | REFUSED_BIT);
    return block_equals(at, -static_cast<int32_t>(code));
  }
  // The number that stands there, 0 when never written or torn.
  int64_t value(const char* at) const {
    if (compact_) return static_cast<int64_t>(load_u64(at));
    const int32_t first = load_word(at, 0);
    return block_equals(at, first) ? first : 0;
  }
  void clear(char* at) const {
    if (compact_) return store_u64(at, 0);
    store_block(at, 0);
  }

 private:
  static int32_t load_word(const char* at, int word) {
    auto* words = reinterpret_cast<int32_t*>(const_cast<char*>(at));
    return std::atomic_ref<int32_t>(words[word]).load(std::memory_order_acquire);
  }
  static void store_block(char* at, int32_t code) {
    auto* words = reinterpret_cast<int32_t*>(at);
    for (int word = 0; word < BLOCK_WORDS; ++word)
      std::atomic_ref<int32_t>(words[word]).store(code, std::memory_order_release);
  }
  static bool block_equals(const char* at, int32_t code) {
    bool same = true;
    for (int word = 0; word < BLOCK_WORDS; ++word) same &= load_word(at, word) == code;
    return same;
  }

  bool compact_;
};

}  // namespace moe_a2a
