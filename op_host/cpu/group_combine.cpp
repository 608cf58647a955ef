// Combine, as the group runs it: give this rank's rows, take the others'.
#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "../../op_kernel/cpu/lines.h"
#include "group.h"

namespace moe_a2a {

void Group::check_handle(const int64_t* handle, int64_t words, const char* operation) const {
  namespace w = handle_word;
  enter(operation);
  if (words < HANDLE_HEADER_WORDS || handle[w::MAGIC] != HANDLE_MAGIC)
    throw Failure(FailureKind::BAD_VALUE,
                  say("%s: handle on rank %ld isn't one that moe_a2a.dispatch returned", operation, rank_));
  if (handle[w::GENERATION] != layout_[GENERATION] || handle[w::WORLD_SIZE] != layout_[WORLD_SIZE] ||
      handle[w::NUM_EXPERTS] != layout_[NUM_EXPERTS] || handle[w::RANK] != rank_ || handle[w::GROUP] != group_id_)
    throw Failure(FailureKind::BAD_VALUE, say("%s: handle on rank %ld belongs to another group than %s", operation, rank_,
                                              name_.c_str()));
  const auto epoch = static_cast<uint64_t>(handle[w::EPOCH]);
  if (epoch > epoch_)
    throw Failure(FailureKind::BAD_VALUE, say("%s: the handle on rank %ld was written to after dispatch returned it", operation,
                                              rank_));
  const CallState& call = state(epoch);
  const bool known = call.epoch == epoch && (call.stage == Stage::OPEN || call.stage == Stage::GIVEN || call.stage == Stage::CLOSED);
  if (!known || epoch_ - epoch >= static_cast<uint64_t>(layout_[SLOTS]))
    throw Failure(FailureKind::HANDLE_EXPIRED,
                  say("%s: the handle of call %lu on rank %ld has expired: %lu newer dispatches have started and the group's "
                      "depth is %ld. Combine earlier or make the group with a larger depth",
                      operation, epoch, rank_, epoch_ - epoch, layout_[SLOTS]));
  // It is a tensor, and tensors can be written to; what it says is compared with what the group knows, and not used.
  const HandleWords where(call.tokens * call.top_k, layout_[WORLD_SIZE], layout_[NUM_EXPERTS], local_end_ - local_begin_);
  const int64_t rows = call.totals[static_cast<size_t>(rank_)];
  if (handle[w::TOKENS] != call.tokens || handle[w::TOP_K] != call.top_k || handle[w::ROWS] != rows ||
      handle[w::OUT_ROWS] != (call.header.pad_to >= 0 ? call.header.pad_to : rows) ||
      handle[w::ALIGN] != call.header.align || words != where.total || handle[w::MATRIX] != where.matrix ||
      handle[w::EXPERT] != where.expert || handle[w::ROW] != where.row || handle[w::IDS] != where.ids)
    throw Failure(FailureKind::BAD_VALUE, say("%s: the handle on rank %ld was written to after dispatch returned it", operation,
                                              rank_));
  if (call.stage != Stage::OPEN && !dropped(Rule::ONE_COMBINE))
    throw Failure(FailureKind::HANDLE_EXPIRED,
                  say("%s: the handle of call %lu on rank %ld was combined already; a handle is good for one combine", operation,
                      epoch, rank_));
}

char* Group::cell_for(uint64_t epoch, int64_t source) const {
  if (dropped(Rule::OWN_WORDS_FOR_CELLS))
    return window(source) + layout_.record_at(epoch, rank_) + layout_[RECORD_CODE] - layout_[CELL_CODE];
  return window(source) + layout_.cell_at(epoch, rank_);
}

void Group::close_call(CallState& call, FailureKind kind, const std::string& text) {
  call.stage = Stage::CLOSED;
  let_go(call);
  write_verdict(layout_, own(), static_cast<int32_t>(kind));
  progress(phase::IDLE);
  throw Failure(kind, text);
}

// Rows that were kept are memory that nobody expects a group to hold on to.
void Group::let_go(CallState& call) {
  if (call.staged.size() > KEPT_STAGE_BYTES) std::vector<char>().swap(call.staged);
}

// No rows to give: whoever waits for some hears why.
void Group::refuse_rows(CallState& call, const CombineInput& input) {
  const std::string text = clip_text(input.bad_y, layout_[CELL_TEXT_BYTES]);
  for (int64_t source : all_peers_) {
    if (rows_between(call, source, rank_) == 0) continue;
    char* cell = cell_for(call.epoch, source);
    int32_t body[CELL_BODY_WORDS] = {};
    body[cell_word::REASON] = static_cast<int32_t>(input.bad_kind);
    body[cell_word::TEXT_BYTES] = static_cast<int32_t>(text.size());
    std::memcpy(cell + layout_[CELL_BODY], body, sizeof body);
    std::memcpy(cell + layout_[CELL_TEXT], text.data(), text.size());
    flags_.store_refusal(cell + layout_[CELL_CODE], layout_.code(call.epoch));
  }
  release_owners(call);
}

Group::Giving Group::plan_giving(const CallState& call, const CombineInput& input) const {
  const RowsView& y = input.y;
  const uint64_t epoch = call.epoch;
  const int64_t total = call.totals[static_cast<size_t>(rank_)], cap = layout_[RECV_ROWS];
  Giving plan{};
  plan.y = y;
  const char* slot_begin = own() + layout_.y_at(epoch);
  plan.in_window = y.rows > 0 && y.data >= slot_begin && y.data < slot_begin + layout_[Y_SLOT_STRIDE] &&
                   (y.rows == 1 || y.stride <= std::numeric_limits<int32_t>::max()) &&
                   rows_fit(y.data - own(), y.stride, y.rows, y.row_bytes, layout_[Y], layout_[ROW_FLAG]);
  int64_t leaves = 0;
  for (int64_t source : all_peers_) leaves += rows_between(call, source, rank_);
  const int64_t bytes = leaves * y.row_bytes;
  plan.streaming = bytes >= tiling_.streaming_bytes;
  plan.push = pushes() && (total > cap || choose_push(bytes, tiling_.combine_push_below, tiling_.combine_push_from, epoch, 1));
  plan.stride = layout_.row_stride(y.row_bytes);
  plan.offset = layout_.y_at(epoch);
  if (plan.push) {
    plan.stride = layout_.remote_stride(y.row_bytes);
    plan.offset = 0;
  } else if (plan.in_window) {
    if (y.rows > 1) plan.stride = y.stride;
    plan.offset = y.data - own();
  }
  plan.waves = plan.push || plan.in_window ? 1 : waves_for(total, cap);
  return plan;
}

// Where the own rows are summed from: y itself, unless the caller may write to it before they are.
void Group::place_own_rows(CallState& call, const RowsView& y, bool keep, bool all_staged) {
  // Staged rows stand in the order of this rank's token list: its own, or, where all come in waves, everybody's.
  const auto first_pair = [&](int64_t e) {
    int64_t pairs = 0;
    for (int64_t before = 0; before < e; ++before) pairs += call.counts[static_cast<size_t>(before)];
    return pairs;
  };
  const int64_t begin = all_staged ? 0 : first_pair(local_begin_);
  const int64_t end = first_pair(all_staged ? layout_[NUM_EXPERTS] : local_end_);
  if (keep || all_staged) call.staged.resize(static_cast<size_t>((end - begin) * y.row_bytes));
  for (int64_t e = local_begin_; e < local_end_; ++e) {
    const auto at = static_cast<size_t>(e);
    call.places[at] = {y.data + call.base[at] * y.stride, y.stride, false};
    if (!keep) continue;
    char* kept = call.staged.data() + (call.start[at] - begin) * y.row_bytes;
    counters_.combine_in_bytes += copy_rows(kernels_, y, call.base[at], call.counts[at], kept, y.row_bytes, false, 0);
    call.places[at] = {kept, y.row_bytes, false};
  }
}

// The rows of one wave, then the words that say so: the cell in the first wave, a watermark in the others.
void Group::give_wave(const CallState& call, const Giving& plan, int64_t wave) {
  const uint64_t epoch = call.epoch, code = layout_.code(epoch);
  const int64_t cap = layout_[RECV_ROWS];
  for (int64_t source : all_peers_) {
    if (rows_between(call, source, rank_) == 0) continue;
    const auto tell = [&] {
      if (wave > 0) return write_mark(layout_, window(source), epoch, Wave::COMBINE_READY, rank_, wave + 1);
      char* cell = cell_for(epoch, source);
      int32_t body[CELL_BODY_WORDS] = {};
      body[cell_word::DTYPE] = static_cast<int32_t>(call.y_dtype);
      body[cell_word::HIDDEN] = static_cast<int32_t>(call.y_hidden);
      body[cell_word::STRIDE] = static_cast<int32_t>(plan.stride);
      body[cell_word::MODE] = static_cast<int32_t>(plan.push ? Mode::PUSH : Mode::PULL);
      put64(body, cell_word::Y_LO, plan.offset);
      std::memcpy(cell + layout_[CELL_BODY], body, sizeof body);
      at_point("cell body");
      flags_.store(cell + layout_[CELL_CODE], code);
    };
    if (dropped(Rule::PAYLOAD_BEFORE_CELL_CODE)) {
      tell();
      at_point("cell code");
    }
    bool any = wave == 0;
    if (plan.push) {
      // In the order of the source's own list: behind its pairs of smaller experts.
      int64_t position = 0;
      for (int64_t e = 0; e < local_begin_; ++e)
        position += call.matrix[static_cast<size_t>(source * layout_[NUM_EXPERTS] + e)];
      char* z = window(source) + layout_.z_at(epoch);
      for_each_run(call, source, rank_, 0, INT64_MAX, [&](int64_t, int64_t, const Run& run) {
        counters_.combine_push_bytes += copy_rows(kernels_, plan.y, run.begin, run.size(), z + position * plan.stride,
                                                  plan.stride, plan.streaming, layout_.line() ? code : 0);
        position += run.size();
      });
    } else if (!plan.in_window) {
      for_each_run(call, source, rank_, wave, cap, [&](int64_t, int64_t, const Run& run) {
        any = true;
        char* to = own() + plan.offset + (run.begin - wave * cap) * plan.stride;
        counters_.combine_in_bytes +=
            copy_rows(kernels_, plan.y, run.begin, run.size(), to, plan.stride, plan.streaming, 0);
      });
    }
    if (plan.streaming && !dropped(Rule::FENCE_AFTER_STREAMING)) kernels_.fence();
    if (any) tell();
  }
}

bool Group::has_rows_in_wave(const CallState& call, int64_t source, int64_t owner, int64_t wave) const {
  bool any = false;
  for_each_run(call, source, owner, wave, layout_[RECV_ROWS], [&](int64_t, int64_t, const Run&) { any = true; });
  return any;
}

// Copies this rank's rows of a wave out of the windows of their owners, and tells them.
void Group::take_combine_wave(CallState& call, int64_t wave) {
  const uint64_t epoch = call.epoch;
  const int64_t cap = layout_[RECV_ROWS], row_bytes = call.y_hidden * itemsize(call.y_dtype);
  for (int64_t owner : call.holders) {
    if (waves_for(call.totals[static_cast<size_t>(owner)], cap) == 1 || !has_rows_in_wave(call, rank_, owner, wave)) continue;
    if (wave > 0)
      await_peers({owner}, epoch, call.combining, phase::COMBINE_WAIT, [&](int64_t peer) {
        return mark_here(layout_, own(), epoch, Wave::COMBINE_READY, peer, wave + 1);
      });
    at_point("take wave");
    // The cell was checked; it says where the slot is and how far its rows are apart.
    const auto* body = reinterpret_cast<const int32_t*>(own() + layout_.cell_at(epoch, owner) + layout_[CELL_BODY]);
    const int64_t stride = body[cell_word::STRIDE];
    const char* row_0 = window(owner) + get64(body, cell_word::Y_LO) - wave * cap * stride;
    for_each_run(call, rank_, owner, wave, cap, [&](int64_t e, int64_t first_row, const Run& run) {
      const RowsView view{row_0, run.end, row_bytes, stride};
      const int64_t position = call.start[static_cast<size_t>(e)] + run.begin - first_row;
      counters_.combine_in_bytes += copy_rows(kernels_, view, run.begin, run.size(),
                                              call.staged.data() + position * row_bytes, row_bytes, false, 0);
    });
    write_mark(layout_, window(owner), epoch, Wave::COMBINE_READ, rank_, wave + 1);
  }
}

// Give, take, say so; the next wave of an owner waits until this one was read. A rank that can't take rows any more still gives
// its own: others wait for them.
void Group::combine_in_waves(CallState& call, const Giving& plan, std::optional<Failure> broken) {
  const uint64_t epoch = call.epoch;
  if (broken) release_owners(call);
  int64_t all_waves = 1;
  for (int64_t rows : call.totals) all_waves = std::max(all_waves, waves_for(rows, layout_[RECV_ROWS]));
  for (int64_t wave = 0; wave < all_waves; ++wave) {
    progress(phase::COMBINE_WRITE);
    if (wave < plan.waves) {
      std::vector<int64_t> readers;
      if (wave > 0 && !dropped(Rule::WAVE_IS_READ))
        for (int64_t source : all_peers_)
          if (has_rows_in_wave(call, source, rank_, wave - 1)) readers.push_back(source);
      await_peers(readers, epoch, call.combining, phase::COMBINE_WRITE, [&](int64_t source) {
        return mark_here(layout_, own(), epoch, Wave::COMBINE_READ, source, wave);
      });
      at_point("give wave");
      give_wave(call, plan, wave);
    }
    if (broken) continue;
    try {
      if (wave == 0) await_cells(call);
    } catch (const Failure& failure) {
      if (poisoned_ || closing_) throw;
      broken = failure;
      release_owners(call);
      continue;
    }
    take_combine_wave(call, wave);
  }
  counters_.waves += all_waves;
  if (broken) close_call(call, broken->kind, broken->what());
  call.taken_in_waves = true;
}

void Group::give_rows(uint64_t epoch, const CombineInput& input) {
  CallState& call = state(epoch);
  call.stage = Stage::GIVEN;
  call.y_hidden = input.hidden;
  call.y_dtype = input.dtype;
  call.taken_in_waves = false;
  call.places.resize(static_cast<size_t>(layout_[NUM_EXPERTS]));
  call.holders.clear();
  for (int64_t owner : all_peers_)
    if (rows_between(call, rank_, owner) > 0) call.holders.push_back(owner);
  progress(phase::COMBINE_WRITE);
  if (!input.bad_y.empty()) {
    refuse_rows(call, input);
    close_call(call, input.bad_kind, input.bad_y);
  }
  const Giving plan = plan_giving(call, input);
  counters_.pushes += plan.push ? 1 : 0;
  const bool waves = !pushes() && std::any_of(call.totals.begin(), call.totals.end(),
                                              [this](int64_t rows) { return rows > layout_[RECV_ROWS]; });
  try {
    place_own_rows(call, input.y, input.async && !plan.in_window, waves);
  } catch (const std::bad_alloc&) {
    CombineInput refused = input;
    refused.bad_kind = FailureKind::OUT_OF_MEMORY;
    refused.bad_y = say("%s: no memory on rank %ld to keep rows of y for later", call.combining, rank_);
    refuse_rows(call, refused);
    close_call(call, refused.bad_kind, refused.bad_y);
  }
  std::optional<Failure> bad_sum;
  if (!input.bad_sum.empty()) bad_sum = Failure(input.bad_kind, input.bad_sum);
  if (waves) return combine_in_waves(call, plan, bad_sum);
  at_point("before cell");
  give_wave(call, plan, 0);
  if (bad_sum) close_call(call, bad_sum->kind, bad_sum->what());
}

// Tells owners whose rows come in waves that this rank waits for none of them any more.
void Group::release_owners(const CallState& call) {
  if (pushes()) return;
  const int64_t cap = layout_[RECV_ROWS];
  for (int64_t owner : call.holders) {
    const int64_t waves = waves_for(call.totals[static_cast<size_t>(owner)], cap);
    if (waves > 1) write_mark(layout_, window(owner), call.epoch, Wave::COMBINE_READ, rank_, waves);
  }
}

// Waits for the cells of the owners that hold rows of this rank, checks them, and notes where the rows are.
void Group::await_cells(CallState& call) {
  const uint64_t epoch = call.epoch, code = layout_.code(epoch);
  const int64_t ranks = layout_[WORLD_SIZE], experts = layout_[NUM_EXPERTS], cap = layout_[RECV_ROWS];
  const int64_t row_bytes = call.y_hidden * itemsize(call.y_dtype);
  const int64_t z_stride = layout_.remote_stride(row_bytes);
  const char* z = own() + layout_.z_at(epoch);
  const auto body_of = [&](int64_t owner) {
    return reinterpret_cast<const int32_t*>(own() + layout_.cell_at(epoch, owner) + layout_[CELL_BODY]);
  };
  const auto same_rows = [&](const int32_t* body) {
    return body[cell_word::DTYPE] == static_cast<int32_t>(call.y_dtype) && body[cell_word::HIDDEN] == call.y_hidden;
  };
  progress(phase::COMBINE_WAIT);
  int64_t refused = -1;
  await_peers(call.holders, epoch, call.combining, phase::COMBINE_WAIT, [&](int64_t owner) {
    const char* at = own() +
                     (dropped(Rule::OWN_WORDS_FOR_CELLS)
                          ? layout_.record_at(epoch, owner) - layout_[CELL_CODE] + layout_[RECORD_CODE]
                          : layout_.cell_at(epoch, owner)) +
                     layout_[CELL_CODE];
    if (flags_.holds_refusal(at, code)) {
      refused = owner;
      return true;
    }
    if (!flags_.holds(at, code)) return false;
    const int32_t* body = body_of(owner);
    if (!layout_.line() || body[cell_word::MODE] != static_cast<int32_t>(Mode::PUSH) || !same_rows(body)) return true;
    // Lines come in any order: the cell says nothing about the rows.
    const int64_t end = first_expert(owner + 1, experts, ranks);
    for (int64_t e = first_expert(owner, experts, ranks); e < end; ++e)
      for (int64_t i = 0; i < call.counts[static_cast<size_t>(e)]; ++i)
        if (!lines_hold(z + (call.start[static_cast<size_t>(e)] + i) * z_stride, row_bytes, code)) return false;
    return true;
  });
  at_point("cells read");
  progress(phase::COMBINE_SUM);
  const auto end_with = [&](FailureKind kind, const std::string& text) {
    write_verdict(layout_, own(), static_cast<int32_t>(kind));
    progress(phase::IDLE);
    throw Failure(kind, text);
  };
  if (refused >= 0) {
    const char* cell = own() + layout_.cell_at(epoch, refused);
    const auto bytes = std::clamp<int64_t>(body_of(refused)[cell_word::TEXT_BYTES], 0, layout_[CELL_TEXT_BYTES]);
    end_with(FailureKind::PEER_ABORTED,
             say("%s, call %lu on rank %ld: rank %ld has no rows to give: %s. The handle is closed; the group stays usable",
                 call.combining, epoch, rank_, refused, readable_text(cell + layout_[CELL_TEXT], bytes).c_str()));
  }
  for (int64_t owner : call.holders) {
    const int32_t* body = body_of(owner);
    if (!same_rows(body) && !dropped(Rule::OWN_WORDS_FOR_CELLS))
      end_with(FailureKind::CALL_MISMATCH,
               say("%s, call %lu on rank %ld: y is %s with H = %ld here and %s with H = %d on rank %ld. The handle is "
                   "closed; the group stays usable",
                   call.combining, epoch, rank_, dtype_name(call.y_dtype), call.y_hidden,
                   dtype_name(static_cast<Dtype>(body[cell_word::DTYPE])), body[cell_word::HIDDEN], owner));
    const int64_t total = call.totals[static_cast<size_t>(owner)];
    const bool push = body[cell_word::MODE] == static_cast<int32_t>(Mode::PUSH);
    const int64_t y_offset = get64(body, cell_word::Y_LO), y_stride = body[cell_word::STRIDE];
    const bool fits = push ? pushes()
                           : (total <= cap || !pushes()) &&
                                 rows_fit(y_offset, y_stride, std::min(total, cap), row_bytes, layout_[Y], layout_[ROW_FLAG]);
    if (!fits && !dropped(Rule::OWN_WORDS_FOR_CELLS))
      end_with(FailureKind::CALL_MISMATCH,
               say("%s, call %lu on rank %ld: rank %ld's cell places y [%ld, %ld] at byte %ld with %ld bytes from row to row, "
                   "which isn't inside its y region. The handle is closed; the group stays usable",
                   call.combining, epoch, rank_, owner, total, call.y_hidden, y_offset, y_stride));
    const int64_t end = first_expert(owner + 1, experts, ranks);
    for (int64_t e = first_expert(owner, experts, ranks); e < end; ++e) {
      const auto at = static_cast<size_t>(e);
      if (push) {
        call.places[at] = {z + call.start[at] * z_stride, z_stride, layout_.line()};
      } else if (total > cap) {
        call.places[at] = {call.staged.data() + call.start[at] * row_bytes, row_bytes, false};
      } else {
        call.places[at] = {window(owner) + y_offset + call.base[at] * y_stride, y_stride, false};
      }
    }
  }
}

Group::CombineShape Group::check_pending_combine(int64_t group, uint64_t epoch) const {
  enter(COMBINE);
  const CallState& call = state(epoch);
  if (group == group_id_ && epoch != 0 && call.epoch == epoch && call.stage == Stage::GIVEN)
    return {call.tokens, call.top_k, call.y_hidden, call.y_dtype};
  if (group != group_id_)
    throw Failure(FailureKind::BAD_VALUE, say("%s: what is waited for on rank %ld belongs to another group than %s", COMBINE,
                                              rank_, name_.c_str()));
  throw Failure(FailureKind::HANDLE_EXPIRED,
                epoch > epoch_ ? say("%s: what is waited for on rank %ld was written to", COMBINE, rank_)
                : call.epoch == epoch && epoch_ - epoch < static_cast<uint64_t>(layout_[SLOTS])
                    ? say("%s: the combine of call %lu on rank %ld was waited for already, or wasn't begun", COMBINE, epoch, rank_)
                    : say("%s: the combine of call %lu on rank %ld has expired: %lu newer dispatches have started and the "
                          "group's depth is %ld. Wait for it earlier or make the group with a larger depth",
                          COMBINE, epoch, rank_, epoch_ - epoch, layout_[SLOTS]));
}

void Group::take_rows(uint64_t epoch, const Weights& weights, const std::string& bad, FailureKind bad_kind, char* out,
                      bool pairs) {
  CallState& call = state(epoch);
  call.stage = Stage::CLOSED;  // whatever happens from here on
  if (!bad.empty()) close_call(call, bad_kind, bad);
  if (!call.taken_in_waves) await_cells(call);
  progress(phase::COMBINE_SUM);
  const auto top_k = static_cast<size_t>(call.top_k);
  if (term_rows_.size() < top_k) {
    term_rows_.resize(top_k);
    term_weights_.resize(top_k);
  }
  const int64_t row_bytes = call.y_hidden * itemsize(call.y_dtype);
  if (layout_.line() && !pairs) unlined_.resize(top_k * static_cast<size_t>(row_bytes));
  at_point("before sum");
  if (pairs) {
    take_pairs(kernels_, call.tokens, call.top_k, row_bytes, call.expert.data(), call.slot.data(), call.places.data(), out);
  } else {
    sum_tokens(kernels_, call.y_dtype, call.tokens, call.top_k, call.y_hidden, call.expert.data(), call.slot.data(),
               call.places.data(), weights, {term_rows_.data(), term_weights_.data(), unlined_.data()}, out);
  }
  let_go(call);
  counters_.combine_out_bytes += call.tokens * (pairs ? call.top_k : 1) * row_bytes;
  ++counters_.combines;
  write_verdict(layout_, own(), 0);
  progress(phase::IDLE);
}

}  // namespace moe_a2a
