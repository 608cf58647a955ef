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
  const CallState& call = state(epoch);
  const bool known = call.epoch == epoch && (call.stage == Stage::OPEN || call.stage == Stage::GIVEN || call.stage == Stage::CLOSED);
  if (!known || epoch > epoch_ || epoch_ - epoch >= static_cast<uint64_t>(layout_[SLOTS]))
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
      handle[w::EXPERT] != where.expert || handle[w::ROW] != where.row)
    throw Failure(FailureKind::BAD_VALUE, say("%s: the handle on rank %ld was written to after dispatch returned it", operation,
                                              rank_));
  if (call.stage != Stage::OPEN && !dropped(Rule::ONE_COMBINE))
    throw Failure(FailureKind::HANDLE_EXPIRED,
                  say("%s: the handle of call %lu on rank %ld was combined already; a handle is good for one combine", operation,
                      epoch, rank_));
}

void Group::give_rows(const CombineInput& input) {
  const auto epoch = static_cast<uint64_t>(input.handle[handle_word::EPOCH]);
  const int64_t experts = layout_[NUM_EXPERTS], cap = layout_[RECV_ROWS];
  CallState& call = state(epoch);
  call.stage = Stage::GIVEN;
  call.y_hidden = input.hidden;
  call.y_dtype = input.dtype;
  call.taken_in_waves = false;
  call.places.resize(static_cast<size_t>(experts));
  call.holders.clear();
  for (int64_t owner : all_peers_)
    if (rows_between(call, rank_, owner) > 0) call.holders.push_back(owner);
  progress(phase::COMBINE_WRITE);
  const RowsView& y = input.y;
  const uint64_t code = layout_.code(epoch);
  const auto cell_of = [&](int64_t source) {
    return window(source) + (dropped(Rule::OWN_WORDS_FOR_CELLS) ? layout_.record_at(epoch, rank_) - layout_[CELL_CODE] +
                                                                       layout_[RECORD_CODE]
                                                                 : layout_.cell_at(epoch, rank_));
  };

  if (!input.bad_y.empty()) {
    // No rows to give: whoever waits for some hears why.
    const std::string text = clip_text(input.bad_y, layout_[CELL_TEXT_BYTES]);
    for (int64_t source : all_peers_) {
      if (rows_between(call, source, rank_) == 0) continue;
      char* cell = cell_of(source);
      int32_t body[CELL_BODY_WORDS] = {};
      body[cell_word::REASON] = static_cast<int32_t>(input.bad_kind);
      body[cell_word::TEXT_BYTES] = static_cast<int32_t>(text.size());
      std::memcpy(cell + layout_[CELL_BODY], body, sizeof body);
      std::memcpy(cell + layout_[CELL_TEXT], text.data(), text.size());
      flags_.store_refusal(cell + layout_[CELL_CODE], code);
    }
    release_owners(call);
    call.stage = Stage::CLOSED;
    write_verdict(layout_, own(), static_cast<int32_t>(input.bad_kind));
    progress(phase::IDLE);
    throw Failure(input.bad_kind, input.bad_y);
  }

  // Own rows are summed from y itself, unless the caller may write to it before they are.
  const int64_t total = call.totals[static_cast<size_t>(rank_)];
  const char* slot_begin = own() + layout_.y_at(epoch);
  const bool in_window = y.rows > 0 && y.data >= slot_begin && y.data < slot_begin + layout_[Y_SLOT_STRIDE] &&
                         (y.rows == 1 || y.stride <= std::numeric_limits<int32_t>::max()) &&
                         rows_fit(y.data - own(), y.stride, y.rows, y.row_bytes, layout_[Y], layout_[ROW]);
  const bool keep = input.async && !in_window;
  const bool waves = !pushes() && std::any_of(call.totals.begin(), call.totals.end(), [cap](int64_t rows) { return rows > cap; });
  // In the order of this rank's token list: its own rows, or, in waves, all of them.
  const auto first_pair = [&](int64_t e) {
    int64_t pairs = 0;
    for (int64_t before = 0; before < e; ++before) pairs += call.counts[static_cast<size_t>(before)];
    return pairs;
  };
  const int64_t staged_begin = waves ? 0 : first_pair(local_begin_);
  if (keep || waves) {
    const int64_t staged_end = first_pair(waves ? experts : local_end_);
    call.staged.resize(static_cast<size_t>((staged_end - staged_begin) * y.row_bytes));
  }
  for (int64_t e = local_begin_; e < local_end_; ++e) {
    const auto at = static_cast<size_t>(e);
    call.places[at] = {y.data + call.base[at] * y.stride, y.stride, false};
    if (!keep) continue;
    char* kept = call.staged.data() + (call.start[at] - staged_begin) * y.row_bytes;
    counters_.combine_in_bytes +=
        copy_rows(kernels_, y, call.base[at], call.counts[at], kept, y.row_bytes, false, 0);
    call.places[at] = {kept, y.row_bytes, false};
  }

  int64_t leaves = 0;
  for (int64_t source : all_peers_) leaves += rows_between(call, source, rank_);
  const int64_t bytes = leaves * y.row_bytes;
  const bool streaming = bytes >= tiling_.streaming_bytes;
  const bool push = pushes() && (total > cap || (choose_push(bytes, tiling_.combine_push_below, tiling_.combine_push_from, epoch, 1)));
  counters_.pushes += push ? 1 : 0;
  const int64_t stride = push        ? layout_.remote_stride(y.row_bytes)
                         : in_window ? (y.rows == 1 ? layout_.row_stride(y.row_bytes) : y.stride)
                                     : layout_.row_stride(y.row_bytes);
  const int64_t offset = push ? 0 : in_window ? y.data - own() : layout_.y_at(epoch);
  const int64_t last_wave = push || in_window ? 0 : waves_for(total, cap) - 1;

  // The rows of one wave, then the words that say so: the cell in the first wave, a watermark in the others.
  const auto give = [&](int64_t wave) {
    for (int64_t source : all_peers_) {
      if (rows_between(call, source, rank_) == 0) continue;
      const auto tell = [&] {
        if (wave > 0) return write_mark(layout_, window(source), epoch, Wave::COMBINE_READY, rank_, wave + 1);
        char* cell = cell_of(source);
        int32_t body[CELL_BODY_WORDS] = {};
        body[cell_word::DTYPE] = static_cast<int32_t>(input.dtype);
        body[cell_word::HIDDEN] = static_cast<int32_t>(input.hidden);
        body[cell_word::STRIDE] = static_cast<int32_t>(stride);
        body[cell_word::MODE] = static_cast<int32_t>(push ? Mode::PUSH : Mode::PULL);
        put64(body, cell_word::Y_LO, offset);
        std::memcpy(cell + layout_[CELL_BODY], body, sizeof body);
        at_point("cell body");
        flags_.store(cell + layout_[CELL_CODE], code);
      };
      if (dropped(Rule::PAYLOAD_BEFORE_CELL_CODE)) {
        tell();
        at_point("cell code");
      }
      bool any = wave == 0;
      if (push) {
        // In the order of the source's own list: behind its pairs of smaller experts.
        int64_t position = 0;
        for (int64_t e = 0; e < local_begin_; ++e) position += call.matrix[static_cast<size_t>(source * experts + e)];
        for_each_run(call, source, rank_, 0, INT64_MAX, [&](int64_t, int64_t, const Run& run) {
          counters_.combine_push_bytes += copy_rows(kernels_, y, run.begin, run.size(),
                                                    window(source) + layout_.z_at(epoch) + position * stride, stride, streaming,
                                                    layout_.line() ? code : 0);
          position += run.size();
        });
      } else if (!in_window) {
        for_each_run(call, source, rank_, wave, cap, [&](int64_t, int64_t, const Run& run) {
          any = true;
          counters_.combine_in_bytes += copy_rows(kernels_, y, run.begin, run.size(),
                                                  own() + offset + (run.begin - wave * cap) * stride, stride, streaming, 0);
        });
      }
      if (streaming && !dropped(Rule::FENCE_AFTER_STREAMING)) kernels_.fence();
      if (any) tell();
    }
  };
  if (!waves) {
    at_point("before cell");
    give(0);
    if (!input.bad_sum.empty()) {
      call.stage = Stage::CLOSED;
      write_verdict(layout_, own(), static_cast<int32_t>(input.bad_kind));
      progress(phase::IDLE);
      throw Failure(input.bad_kind, input.bad_sum);
    }
    return;
  }

  // In waves: give, take, say so; the next wave of an owner waits until this one was read. A rank that can't take rows any more
  // still gives its own: others wait for them.
  std::optional<Failure> broken;
  const auto give_up_taking = [&](const Failure& failure) {
    if (poisoned_ || closing_) throw failure;
    broken = failure;
    release_owners(call);
  };
  if (!input.bad_sum.empty()) give_up_taking(Failure(input.bad_kind, input.bad_sum));
  int64_t all_waves = 1;
  for (int64_t rows : call.totals) all_waves = std::max(all_waves, waves_for(rows, cap));
  const auto touches = [&](int64_t source, int64_t owner, int64_t wave) {
    bool any = false;
    for_each_run(call, source, owner, wave, cap, [&](int64_t, int64_t, const Run&) { any = true; });
    return any;
  };
  for (int64_t wave = 0; wave < all_waves; ++wave) {
    progress(phase::COMBINE_WRITE);
    if (wave <= last_wave) {
      std::vector<int64_t> readers;
      if (wave > 0 && !dropped(Rule::WAVE_IS_READ))
        for (int64_t source : all_peers_)
          if (touches(source, rank_, wave - 1)) readers.push_back(source);
      await_peers(readers, epoch, COMBINE, phase::COMBINE_WRITE, [&](int64_t source) {
        return mark_here(layout_, own(), epoch, Wave::COMBINE_READ, source, wave);
      });
      at_point("give wave");
      give(wave);
    }
    if (broken) continue;
    if (wave == 0) {
      try {
        await_cells(call);
      } catch (const Failure& failure) {
        give_up_taking(failure);
        continue;
      }
    }
    for (int64_t owner : call.holders) {
      if (waves_for(call.totals[static_cast<size_t>(owner)], cap) == 1 || !touches(rank_, owner, wave)) continue;
      if (wave > 0)
        await_peers({owner}, epoch, COMBINE, phase::COMBINE_WAIT, [&](int64_t peer) {
          return mark_here(layout_, own(), epoch, Wave::COMBINE_READY, peer, wave + 1);
        });
      at_point("take wave");
      // The cell was checked; it says where the slot is and how far its rows are apart.
      const auto* body = reinterpret_cast<const int32_t*>(own() + layout_.cell_at(epoch, owner) + layout_[CELL_BODY]);
      const char* rows = window(owner) + get64(body, cell_word::Y_LO);
      const int64_t y_stride = body[cell_word::STRIDE];
      for_each_run(call, rank_, owner, wave, cap, [&](int64_t e, int64_t first_row, const Run& run) {
        const RowsView view{rows - wave * cap * y_stride, run.end, y.row_bytes, y_stride};
        const int64_t position = call.start[static_cast<size_t>(e)] + run.begin - first_row;
        counters_.combine_in_bytes += copy_rows(kernels_, view, run.begin, run.size(),
                                                call.staged.data() + position * y.row_bytes, y.row_bytes, false, 0);
      });
      write_mark(layout_, window(owner), epoch, Wave::COMBINE_READ, rank_, wave + 1);
    }
  }
  counters_.waves += all_waves;
  if (broken) {
    call.stage = Stage::CLOSED;
    write_verdict(layout_, own(), static_cast<int32_t>(broken->kind));
    progress(phase::IDLE);
    throw *broken;
  }
  call.taken_in_waves = true;
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
  await_peers(call.holders, epoch, COMBINE, phase::COMBINE_WAIT, [&](int64_t owner) {
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
                 COMBINE, epoch, rank_, refused, readable_text(cell + layout_[CELL_TEXT], bytes).c_str()));
  }
  for (int64_t owner : call.holders) {
    const int32_t* body = body_of(owner);
    if (!same_rows(body) && !dropped(Rule::OWN_WORDS_FOR_CELLS))
      end_with(FailureKind::CALL_MISMATCH,
               say("%s, call %lu on rank %ld: y is %s with H = %ld here and %s with H = %d on rank %ld. The handle is "
                   "closed; the group stays usable",
                   COMBINE, epoch, rank_, dtype_name(call.y_dtype), call.y_hidden,
                   dtype_name(static_cast<Dtype>(body[cell_word::DTYPE])), body[cell_word::HIDDEN], owner));
    const int64_t total = call.totals[static_cast<size_t>(owner)];
    const bool push = body[cell_word::MODE] == static_cast<int32_t>(Mode::PUSH);
    const int64_t y_offset = get64(body, cell_word::Y_LO), y_stride = body[cell_word::STRIDE];
    const bool fits = push ? pushes()
                           : (total <= cap || !pushes()) &&
                                 rows_fit(y_offset, y_stride, std::min(total, cap), row_bytes, layout_[Y], layout_[ROW]);
    if (!fits && !dropped(Rule::OWN_WORDS_FOR_CELLS))
      end_with(FailureKind::CALL_MISMATCH,
               say("%s, call %lu on rank %ld: rank %ld's cell places y [%ld, %ld] at byte %ld with %ld bytes from row to row, "
                   "which isn't inside its y region. The handle is closed; the group stays usable",
                   COMBINE, epoch, rank_, owner, total, call.y_hidden, y_offset, y_stride));
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
                call.epoch == epoch && epoch_ - epoch < static_cast<uint64_t>(layout_[SLOTS])
                    ? say("%s: the combine of call %lu on rank %ld was waited for already", COMBINE, epoch, rank_)
                    : say("%s: the combine of call %lu on rank %ld has expired: %lu newer dispatches have started and the "
                          "group's depth is %ld. Wait for it earlier or make the group with a larger depth",
                          COMBINE, epoch, rank_, epoch_ - epoch, layout_[SLOTS]));
}

void Group::take_rows(uint64_t epoch, const Weights& weights, const std::string& bad, FailureKind bad_kind, char* out) {
  CallState& call = state(epoch);
  call.stage = Stage::CLOSED;  // whatever happens from here on
  if (!bad.empty()) {
    write_verdict(layout_, own(), static_cast<int32_t>(bad_kind));
    progress(phase::IDLE);
    throw Failure(bad_kind, bad);
  }
  if (!call.taken_in_waves) await_cells(call);
  progress(phase::COMBINE_SUM);
  const auto top_k = static_cast<size_t>(call.top_k);
  if (term_rows_.size() < top_k) {
    term_rows_.resize(top_k);
    term_weights_.resize(top_k);
  }
  const int64_t row_bytes = call.y_hidden * itemsize(call.y_dtype);
  if (layout_.line()) unlined_.resize(top_k * static_cast<size_t>(row_bytes));
  at_point("before sum");
  sum_tokens(kernels_, call.y_dtype, call.tokens, call.top_k, call.y_hidden, call.expert.data(), call.slot.data(),
             call.places.data(), weights, {term_rows_.data(), term_weights_.data(), unlined_.data()}, out);
  counters_.combine_out_bytes += call.tokens * row_bytes;
  ++counters_.combines;
  write_verdict(layout_, own(), 0);
  progress(phase::IDLE);
}

}  // namespace moe_a2a
