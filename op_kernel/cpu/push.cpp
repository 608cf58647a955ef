#include "push.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "flag.h"
#include "lines.h"

namespace moe_a2a {
namespace {

int64_t group_rows(const Landing& run) { return run.flag_rows > 0 ? run.flag_rows : run.count; }

// The rows that end a group: row(last) for each.
template <class Row>
void for_each_group(const Landing& run, Row row) {
  const int64_t step = group_rows(run);
  for (int64_t begin = 0; begin < run.count; begin += step) row(std::min(begin + step, run.count) - 1);
}

}  // namespace

int64_t push_rows(const RowKernels& kernels, const Layout& layout, const Source& from, int64_t first, const Wire& wire,
                  bool streaming, const Landing& to) {
  const auto copy = streaming ? kernels.copy_streaming : kernels.copy;
  const Flags flags(layout.compact());
  const int64_t step = group_rows(to);
  std::vector<char> whole(layout.line() ? static_cast<size_t>(wire.push_bytes) : 0);
  for (int64_t i = 0; i < to.count; ++i) {
    const char* row = from.x + from.list[first + i] * from.stride;
    char* place = to.rows + i * to.stride;
    if (layout.line()) {
      std::memcpy(whole.data(), row, static_cast<size_t>(wire.pull_bytes));
      if (wire.weight_bytes != 0)
        std::memcpy(whole.data() + wire.weight_offset, from.weight_list + (first + i) * wire.weight_bytes,
                    static_cast<size_t>(wire.weight_bytes));
      put_lines(place, whole.data(), wire.push_bytes, to.code);
      at_point("push row");
      continue;
    }
    const bool last = (i + 1) % step == 0 || i + 1 == to.count;
    if (dropped(Rule::PAYLOAD_BEFORE_ROW_FLAG) && last) {
      flags.store(to.flags + i * to.flag_stride, to.code);
      at_point("row flag");
    }
    copy(place, row, static_cast<size_t>(wire.pull_bytes));
    if (wire.weight_bytes != 0)
      std::memcpy(place + wire.weight_offset, from.weight_list + (first + i) * wire.weight_bytes,
                  static_cast<size_t>(wire.weight_bytes));
    at_point("push row");
    if (!last) continue;
    if (streaming && !dropped(Rule::FENCE_AFTER_STREAMING)) kernels.fence();
    flags.store(to.flags + i * to.flag_stride, to.code);
  }
  return to.count * (wire.data_bytes + wire.scale_bytes);
}

bool rows_here(const Layout& layout, const Landing& at, const Wire& wire) {
  if (layout.line()) {
    for (int64_t i = 0; i < at.count; ++i)
      if (!lines_hold(at.rows + i * at.stride, wire.push_bytes, at.code)) return false;
    return true;
  }
  const Flags flags(layout.compact());
  bool here = true;
  for_each_group(at, [&](int64_t last) { here = here && flags.holds(at.flags + last * at.flag_stride, at.code); });
  return here;
}

int64_t take_rows(const RowKernels& kernels, const Layout& layout, const Landing& at, const Wire& wire, bool streaming,
                  int64_t row, const Received& out) {
  const auto copy = streaming ? kernels.copy_streaming : kernels.copy;
  const int64_t bytes = at.count * (wire.data_bytes + wire.scale_bytes);
  if (!layout.line() && at.stride == wire.data_bytes) {  // nothing but elements, side by side
    copy(out.rows + row * wire.data_bytes, at.rows, static_cast<size_t>(at.count * wire.data_bytes));
    return bytes;
  }
  for (int64_t i = 0; i < at.count; ++i, ++row) {
    const char* from = at.rows + i * at.stride;
    const auto take = [&](char* to, int64_t begin, int64_t size) {
      if (layout.line()) return get_lines(to, from, begin, size);
      std::memcpy(to, from + begin, static_cast<size_t>(size));
    };
    if (layout.line()) {
      get_lines(out.rows + row * wire.data_bytes, from, 0, wire.data_bytes);
    } else {
      copy(out.rows + row * wire.data_bytes, from, static_cast<size_t>(wire.data_bytes));
    }
    if (wire.scale_bytes != 0) take(out.scales + row * wire.scale_bytes, wire.scale_offset, wire.scale_bytes);
    if (wire.weight_bytes != 0) take(out.weights + row * wire.weight_bytes, wire.weight_offset, wire.weight_bytes);
  }
  return bytes;
}

void clear_rows(const Layout& layout, const Landing& at, const Wire& wire) {
  if (layout.line()) {
    for (int64_t i = 0; i < at.count; ++i) clear_lines(at.rows + i * at.stride, wire.push_bytes);
    return;
  }
  const Flags flags(layout.compact());
  for_each_group(at, [&](int64_t last) { flags.clear(at.flags + last * at.flag_stride); });
}

}  // namespace moe_a2a
