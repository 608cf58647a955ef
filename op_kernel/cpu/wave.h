// Waves: rows that don't fit a window's slot go through it in turns. Wave w has the rows [w cap, (w + 1) cap) of what a rank
// receives. A watermark tells the other side how many waves are done: with the code of its call beside it, since the cell may
// still hold what an older call left. The watermark is written before the code and only grows during a call.
//
// Example: a cell left by call 3 holds {code 3, mark 5}. In call 7 its writer stores mark 1, then code 7: a reader that waits for
// "call 7, at least 1" sees {3, 5}, {3, 1}, {7, 1}, and takes the last one only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "flag.h"
#include "layout.h"

namespace moe_a2a {

// A run of rows at their final positions: [begin, end).
struct Run {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// The part of rows [begin, begin + count) that belongs to wave `wave`; empty when begin >= end.
constexpr Run in_wave(int64_t begin, int64_t count, int64_t wave, int64_t cap) {
  if (cap >= INT64_MAX - begin - count) return {begin, begin + count};  // everything is one wave
  return {std::max(begin, wave * cap), std::min(begin + count, (wave + 1) * cap)};
}

constexpr int64_t waves_for(int64_t rows, int64_t cap) { return rows <= cap ? 1 : (rows + cap - 1) / cap; }

inline void write_mark(const Layout& layout, char* window, uint64_t epoch, Wave what, int64_t writer, int64_t mark) {
  const Flags flags(layout.compact());
  char* cell = window + layout.wave_at(epoch, what, writer);
  if (dropped(Rule::MARK_BEFORE_WAVE_CODE)) {
    flags.store(cell + layout[WAVE_CODE], layout.code(epoch));
    at_point("wave code");
  }
  flags.store(cell + layout[WAVE_MARK], static_cast<uint64_t>(mark));
  at_point("wave mark");
  flags.store(cell + layout[WAVE_CODE], layout.code(epoch));
}

// Has `writer` reached `mark` in call `epoch`?
inline bool mark_here(const Layout& layout, const char* window, uint64_t epoch, Wave what, int64_t writer, int64_t mark) {
  const Flags flags(layout.compact());
  const char* cell = window + layout.wave_at(epoch, what, writer);
  if (!dropped(Rule::WAVE_MARK_HAS_CODE) && !flags.holds(cell + layout[WAVE_CODE], layout.code(epoch))) return false;
  return flags.value(cell + layout[WAVE_MARK]) >= mark;
}

}  // namespace moe_a2a
