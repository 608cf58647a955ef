// Dispatch, as the group runs it: send, hear of all, receive.
#include <algorithm>
#include <cstring>
#include <limits>

#include "group.h"

namespace moe_a2a {

// ---------------------------------------------------------------------------------------------------------- records

void Group::publish(uint64_t epoch, const CallHeader& header, const void* payload, int64_t payload_bytes) {
  bool first = true;
  for (int64_t peer : all_peers_) {
    if (header.kind == kind::ABORT && !first && dropped(Rule::ABORT_TO_ALL)) continue;
    first = false;
    if (header.kind == kind::COUNTS && header.routing == 0 && dropped(Rule::ZERO_RECORDS)) {
      const CallState& call = state(epoch);
      const int64_t begin = first_expert(peer, layout_[NUM_EXPERTS], layout_[WORLD_SIZE]);
      const int64_t end = first_expert(peer + 1, layout_[NUM_EXPERTS], layout_[WORLD_SIZE]);
      if (std::all_of(call.counts.begin() + begin, call.counts.begin() + end, [](int32_t count) { return count == 0; }))
        continue;
    }
    at_point("record");
    write_record(layout_, window(peer), rank_, epoch, header, payload, payload_bytes);
  }
}

CallHeader Group::new_header(uint64_t epoch, kind::Kind kind) const {
  CallHeader header{};
  header.kind = kind;
  header.generation = static_cast<int32_t>(layout_[GENERATION]);
  header.epoch = epoch;
  header.pad_to = -1;
  header.align = 1;
  header.read = done_;
  return header;
}

void Group::note_read() {
  while (done_ < epoch_) {
    const CallState& call = state(done_ + 1);
    // A call whose slot is in use by a later one is over.
    if (call.epoch == done_ + 1 && (call.stage == Stage::SENT || call.stage == Stage::MET)) break;
    ++done_;
  }
  uint64_t all = done_;
  for (int64_t peer : all_peers_) all = std::min(all, peers_done_[static_cast<size_t>(peer)]);
  all_done_ = all;
}

void Group::fail(CallState& call, FailureKind kind, const std::string& text) {
  call.stage = Stage::FAILED;
  call.failure = text;
  call.failure_kind = kind;
  write_verdict(layout_, own(), static_cast<int32_t>(kind));
  note_read();
}

// How a peer's record doesn't go with this rank's; empty when it does.
std::string Group::differs(const CallHeader& mine, const CallHeader& theirs, int64_t peer) const {
  const auto says = [&](const char* what, const std::string& a, const std::string& b) {
    return say("%s is %s on rank %ld and %s on rank %ld", what, a.c_str(), rank_, b.c_str(), peer);
  };
  const auto number = [](int64_t value) { return std::to_string(value); };
  const auto type = [](int32_t code) { return std::string(dtype_name(static_cast<Dtype>(code))); };
  if (theirs.generation != mine.generation)
    return says("the generation of the windows", number(mine.generation), number(theirs.generation));
  if (theirs.epoch != mine.epoch)
    return says("the call number", std::to_string(mine.epoch), std::to_string(theirs.epoch));
  if (theirs.kind != mine.kind) {
    const auto name = [&](int32_t kind) -> std::string {
      return kind == kind::COUNTS ? "a dispatch of rows" : kind == kind::ROUND ? "a round of backward" : number(kind);
    };
    return says("the kind of call", name(mine.kind), name(theirs.kind));
  }
  if (theirs.tag != mine.tag) return says("tag (which layer is calling)", number(mine.tag), number(theirs.tag));
  if (theirs.hidden != mine.hidden) return says("x's hidden size H", number(mine.hidden), number(theirs.hidden));
  if (theirs.dtype != mine.dtype) return says("x's dtype", type(mine.dtype), type(theirs.dtype));
  if (theirs.weight_dtype != mine.weight_dtype)
    return says("topk_weights' dtype (none: not given)", type(mine.weight_dtype), type(theirs.weight_dtype));
  if (theirs.quant != mine.quant) return says("quantize", quant_name(mine.quant), quant_name(theirs.quant));
  if (theirs.align != mine.align) return says("align", number(mine.align), number(theirs.align));
  if ((theirs.routing != 0) != (mine.routing != 0))
    return says("routing", mine.routing != 0 ? "used again" : "new", theirs.routing != 0 ? "used again" : "new");
  if (theirs.routing != mine.routing)
    return says("the routing that is used again (its digest)", number(mine.routing), number(theirs.routing));
  // What another process wrote is checked before it is used: a rank must not crash because another one is wrong.
  const bool fused = theirs.mode == static_cast<int32_t>(Mode::FUSED);
  if (fused != (mine.mode == static_cast<int32_t>(Mode::FUSED)))
    return says("the call", fused ? "dispatch" : MOE, fused ? MOE : "dispatch");
  const bool push = fused || theirs.mode == static_cast<int32_t>(Mode::PUSH);
  if ((theirs.mode != static_cast<int32_t>(Mode::PULL) && !fused && !(push && pushes())) || theirs.flag_rows < 0)
    return say("rank %ld's record asks for mode %d with %d rows a flag, which rank %ld doesn't know", peer, theirs.mode,
               theirs.flag_rows, rank_);
  if (theirs.pad_to < -1) return say("rank %ld's record says pad_to = %ld", peer, theirs.pad_to);
  const CallState& call = state(mine.epoch);
  if (theirs.tokens < 0 || theirs.tokens > layout_[MAX_TOKENS] || theirs.top_k < 0 || theirs.top_k > layout_[TOP_K] ||
      (!push && theirs.kind != kind::ROUND && !rows_fit(theirs.x_offset, theirs.x_stride, theirs.tokens, call.wire.pull_bytes, layout_[X], layout_[Y])))
    return say("rank %ld's record places x [%ld, %ld] at byte %ld with %ld bytes from row to row, which isn't inside its x region",
               peer, theirs.tokens, theirs.hidden, theirs.x_offset, theirs.x_stride);
  return {};
}

void Group::hear(uint64_t epoch, uint64_t asked, const char* operation) {
  while (heard_ < epoch) hear_one(heard_ + 1, heard_ + 1 == asked, operation);
}

void Group::hear_one(uint64_t epoch, bool asked, const char* operation) {
  CallState& call = state(epoch);
  const bool reused_without_records = dropped(Rule::REUSE_HAS_RECORDS) && call.header.routing != 0;
  if (!reused_without_records)
    await_peers(all_peers_, epoch, operation, phase::DISPATCH_COUNTS, [&](int64_t peer) {
      if (!record_here(layout_, own(), peer, epoch)) return false;
      at_point("record read");
      if (asked && call.stage == Stage::SENT && read_record(layout_, own(), peer, epoch).kind == kind::ABORT) {
        fail(call, FailureKind::PEER_ABORTED,
             say("%s, call %lu on rank %ld: rank %ld aborted the call: %s. Nothing was exchanged; the group stays usable",
                 operation, epoch, rank_, peer, record_text(layout_, own(), peer, epoch).c_str()));
        throw Failure(call.failure_kind, call.failure);
      }
      return true;
    });
  heard_ = epoch;
  if (!reused_without_records)
    for (int64_t peer : all_peers_) {
      uint64_t& done = peers_done_[static_cast<size_t>(peer)];
      // Never more than can be true, whatever it says.
      done = std::max(done, std::min(read_record(layout_, own(), peer, epoch).read, epoch - 1));
    }
  if (call.stage == Stage::SENT) judge(call);
  note_read();
}

// All records of the call are here: keeps what they say, and decides. Every rank sees the same records and decides alike.
void Group::judge(CallState& call) {
  const uint64_t epoch = call.epoch;
  const int64_t ranks = layout_[WORLD_SIZE], experts = layout_[NUM_EXPERTS];
  const auto refuse = [&](const std::string& why) {
    fail(call, FailureKind::CALL_MISMATCH,
         say("%s, call %lu on rank %ld: the ranks' calls don't go together: %s. Nothing was exchanged; the group stays usable",
             call.operation, epoch, rank_, why.c_str()));
  };
  call.flag_rows.resize(static_cast<size_t>(ranks));
  call.ids.resize(static_cast<size_t>(ranks));
  call.pads.resize(static_cast<size_t>(ranks));
  call.sources.resize(static_cast<size_t>(ranks));
  call.matrix.resize(static_cast<size_t>(ranks * experts));
  call.base.resize(static_cast<size_t>(experts));
  call.totals.resize(static_cast<size_t>(ranks));
  const bool alone = dropped(Rule::REUSE_HAS_RECORDS) && call.header.routing != 0;
  int64_t late = -1, prompt = -1;  // ranks that wait for their rows later, and at once
  call.gradients = 0;
  std::string weights;  // in which two ranks' weights for combine differ
  int32_t first_weights = 0;
  int64_t first = -1, wants = -1;
  for (int64_t s = 0; s < ranks; ++s) {
    const CallHeader header = s == rank_ || alone ? call.header : read_record(layout_, own(), s, epoch);
    if (header.kind == kind::ABORT)
      return fail(call, FailureKind::PEER_ABORTED,
                  say("%s, call %lu on rank %ld: rank %ld aborted the call: %s. Nothing was exchanged; the group stays usable",
                      call.operation, epoch, rank_, s, record_text(layout_, own(), s, epoch).c_str()));
    if (s != rank_ && !alone) {
      const std::string mismatch = differs(call.header, header, s);
      if (!mismatch.empty()) return refuse(mismatch);
    }
    const auto at = static_cast<size_t>(s);
    const bool push = header.mode != static_cast<int32_t>(Mode::PULL);
    call.gradients |= header.gradients & GRADIENT_BITS;
    if ((header.gradients & GRADIENT_BITS) != 0) wants = s;
    if (const int32_t said = header.gradients / COMBINE_WEIGHTS; said > 0) {
      if (first < 0) {
        first = s;
        first_weights = said;
      } else if (said != first_weights && weights.empty()) {
        const auto type = [](int32_t word) { return dtype_name(static_cast<Dtype>(word - 1)); };
        weights = say("topk_weights' dtype (none: not given) is %s on rank %ld and %s on rank %ld", type(first_weights), first,
                      type(said), s);
      }
    }
    call.ids[at] = header.ids;
    call.flag_rows[at] = push ? header.flag_rows : -1;
    call.pads[at] = header.pad_to;
    (header.async != 0 ? late : prompt) = s;
    call.sources[at] = {push ? nullptr : window(s) + header.x_offset, header.x_stride, header.tokens,
                        reinterpret_cast<const int32_t*>(window(s) + layout_.list_at(epoch)),
                        window(s) + layout_.weight_at(epoch)};
    int32_t* counts = call.matrix.data() + s * experts;
    if (call.header.routing == 0) {
      if (s == rank_) {
        std::memcpy(counts, call.counts.data(), static_cast<size_t>(experts) * 4);
      } else {
        read_counts(layout_, own(), s, epoch, counts);
      }
    }
    int64_t pairs = 0;
    for (int64_t e = 0; e < experts; ++e) pairs = counts[e] < 0 ? -1 : pairs < 0 ? pairs : pairs + counts[e];
    if (pairs < 0 || pairs > header.tokens * header.top_k)
      return refuse(say("rank %ld's record counts %ld pairs of %ld tokens with %ld experts each", s, pairs, header.tokens,
                        header.top_k));
  }
  // They don't travel now, but they will in backward.
  if (wants >= 0 && !weights.empty()) return refuse(say("%s, while rank %ld wants gradients", weights.c_str(), wants));
  call.sources[static_cast<size_t>(rank_)] = call.own;
  row_bases(call.matrix.data(), ranks, experts, rank_, call.header.align, call.base.data(), call.totals.data());
  call.waves = 1;
  for (int64_t owner = 0; owner < ranks; ++owner) {
    const int64_t total = call.totals[static_cast<size_t>(owner)], pad = call.pads[static_cast<size_t>(owner)];
    if (pad >= 0 && total > pad)
      return fail(call, FailureKind::PAD_TOO_SMALL,
                  say("%s, call %lu on rank %ld: rank %ld would receive %ld rows%s and asked for pad_to = %ld. Nothing was "
                      "exchanged; the group stays usable. Raise pad_to, or leave it out",
                      call.operation, epoch, rank_, owner, total, call.header.align > 1 ? " (with align)" : "", pad));
    if (total > std::numeric_limits<int32_t>::max())
      return fail(call, FailureKind::BAD_VALUE,
                  say("%s, call %lu on rank %ld: rank %ld would receive %ld rows; positions are int32. Dispatch fewer tokens at "
                      "once",
                      call.operation, epoch, rank_, owner, total));
    call.waves = std::max(call.waves, waves_for(total, layout_[RECV_ROWS]));
  }
  if (std::all_of(call.flag_rows.begin(), call.flag_rows.end(), [](int64_t rows) { return rows < 0; })) call.waves = 1;
  // A wave is acknowledged by whoever receives it: a rank that receives later would hold up those that push to it now, and wait
  // for them in its next call.
  if (call.waves > 1 && late >= 0 && prompt >= 0)
    return refuse(say("async_op is used on rank %ld and not on rank %ld, and rank %ld receives more rows than the window holds "
                      "(max_recv_rows = %ld), which some rank pushes",
                      late, prompt, std::distance(call.totals.begin(), std::max_element(call.totals.begin(), call.totals.end())), layout_[RECV_ROWS]));
  const int64_t local = local_end_ - local_begin_;
  call.local_counts.assign(static_cast<size_t>(local), 0);
  call.offsets.resize(static_cast<size_t>(local) + 1);
  call.offsets[0] = 0;
  for (int64_t e = 0; e < local; ++e) {
    int64_t& rows = call.local_counts[static_cast<size_t>(e)];
    for (int64_t s = 0; s < ranks; ++s) rows += call.matrix[static_cast<size_t>(s * experts + local_begin_ + e)];
    call.offsets[static_cast<size_t>(e) + 1] =
        call.offsets[static_cast<size_t>(e)] + static_cast<int32_t>(align_up(rows, call.header.align));
  }
  call.stage = Stage::MET;
}

// ------------------------------------------------------------------------------------------------------------- send

void Group::clear_lap(uint64_t epoch) {
  // On the first use of a slot in a new lap the codes of the lap before would match again, so they are cleared before the record
  // is published. At the second use once more: what this rank didn't wait for at the slot's last use in the old lap (the cell for a
  // combine that ended early, the last word about a wave, rows for a call that was abandoned) a peer may have written after the
  // first clearing; now that its record of the first use was read, it has.
  if (dropped(Rule::CLEAR_IN_A_NEW_LAP)) return;
  const uint64_t uses = (dropped(Rule::CLEAR_TWICE) ? 1 : 2) * static_cast<uint64_t>(layout_[SLOTS]);
  const uint64_t before = epoch > uses ? layout_.lap(epoch - uses) : 0;
  if (layout_.lap(epoch) == before) return;
  const auto clear = [&](int64_t begin, int64_t count, int64_t stride, int64_t code) {
    for (int64_t i = 0; i < count; ++i) flags_.clear(own() + begin + i * stride + code);
  };
  const int64_t ranks = layout_[WORLD_SIZE];
  clear(layout_.cell_at(epoch, 0), ranks, layout_[CELL_STRIDE], layout_[CELL_CODE]);
  clear(layout_.wave_at(epoch, Wave::DISPATCH_READ, 0), layout_[WAVE_SLOT_STRIDE] / layout_[WAVE_STRIDE],
        layout_[WAVE_STRIDE], layout_[WAVE_CODE]);
  if (layout_.line()) {
    if (!pushes()) return;
    clear(layout_.row_at(epoch), layout_[ROW_SLOT_STRIDE] / LINE, LINE, LINE_PAYLOAD);
    clear(layout_.z_at(epoch), layout_[Z_SLOT_STRIDE] / LINE, LINE, LINE_PAYLOAD);
  } else {
    clear(layout_.row_flag_at(epoch), layout_[RECV_ROWS], layout_[ROW_FLAG_STRIDE], 0);
  }
}

void Group::end_call_before(uint64_t epoch) {
  const auto slots = static_cast<uint64_t>(layout_[SLOTS]);
  if (epoch <= slots) return;
  const uint64_t old = epoch - slots;
  // Only a rank that has read all records of n - NS may publish n: a peer that does so, too, is then never more than 2 NS ahead
  // of a record that somebody hasn't read.
  if (!dropped(Rule::RECORDS_ARE_READ)) hear(old, 0, DISPATCH);
  CallState& call = state(epoch);
  if (call.epoch == old && call.stage == Stage::GIVEN) release_owners(call);
  call.stage = Stage::CLOSED;
  note_read();
}

bool Group::choose_push(int64_t bytes, int64_t below, int64_t from, uint64_t epoch, int64_t salt) const {
  if (!pushes()) return false;
  if (tiling_.mix != 0) {
    const int32_t words[4] = {static_cast<int32_t>(tiling_.mix), static_cast<int32_t>(epoch), static_cast<int32_t>(rank_),
                              static_cast<int32_t>(salt)};
    return (digest(words, 4) >> 7) & 1;
  }
  return bytes < below || bytes >= from;
}

// Takes the routing of an older dispatch from its handle. Returns why that can't be, empty when it could.
std::string Group::read_routing(const DispatchInput& input, CallState& call) const {
  namespace w = handle_word;
  const int64_t* handle = input.routing;
  const int64_t experts = layout_[NUM_EXPERTS], ranks = layout_[WORLD_SIZE];
  const auto changed = [this, &call] {
    return say("%s: routing on rank %ld is a handle that was written to after dispatch returned it", call.operation, rank_);
  };
  if (input.routing_words < HANDLE_HEADER_WORDS || handle[w::MAGIC] != HANDLE_MAGIC)
    return say("%s: routing on rank %ld isn't a handle that moe_a2a.dispatch returned", call.operation, rank_);
  if (handle[w::GENERATION] != layout_[GENERATION] || handle[w::WORLD_SIZE] != ranks || handle[w::NUM_EXPERTS] != experts ||
      handle[w::RANK] != rank_ || handle[w::GROUP] != group_id_)
    return say("%s: routing on rank %ld belongs to another group than %s", call.operation, rank_, name_.c_str());
  const int64_t tokens = handle[w::TOKENS], top_k = handle[w::TOP_K];
  if (tokens < 0 || tokens > layout_[MAX_TOKENS] || top_k < 0 || top_k > layout_[TOP_K]) return changed();
  const HandleWords words(tokens * top_k, ranks, experts, local_end_ - local_begin_);
  if (input.routing_words != words.total) return changed();
  if (!input.round && input.x.rows != tokens)
    return say("%s: x has T = %ld rows on rank %ld, the routing that is used again has %ld", call.operation, input.x.rows, rank_,
               tokens);
  const auto* matrix = reinterpret_cast<const int32_t*>(handle + words.matrix);
  const auto* expert = reinterpret_cast<const int32_t*>(handle + words.expert);
  call.matrix.assign(matrix, matrix + ranks * experts);
  const TopkIdx idx{expert, false, tokens, top_k, top_k, 1};
  call.tokens = tokens;
  call.top_k = top_k;
  call.expert.resize(static_cast<size_t>(tokens * top_k));
  call.slot.resize(static_cast<size_t>(tokens * top_k));
  if (send_counts(idx, experts, call.counts.data(), call.slot.data(), call.expert.data()).found) return changed();
  if (!std::equal(call.counts.begin(), call.counts.end(), matrix + rank_ * experts)) return changed();
  return {};
}

uint64_t Group::send_dispatch(const DispatchInput& input) {
  enter(input.operation);
  end_call_before(epoch_ + 1);
  const uint64_t epoch = advance_counter(layout_, own());
  epoch_ = epoch;
  CallState& call = state(epoch);
  call.epoch = epoch;
  call.stage = Stage::FAILED;  // until its record is out
  call.failure.clear();
  call.waiting.clear();
  call.order.clear();
  call.operation = input.operation;
  call.combining = input.operation == DISPATCH ? COMBINE : input.operation;
  call.header = new_header(epoch, input.round ? kind::ROUND : kind::COUNTS);
  progress(phase::DISPATCH_PACK);
  try {
    send_call(input, call);
  } catch (const std::bad_alloc&) {
    if (call.stage == Stage::SENT) throw;
    send_abort(call, FailureKind::OUT_OF_MEMORY, say("%s: no memory on rank %ld to send a call", call.operation, rank_));
  }
  progress(phase::DISPATCH_COUNTS);
  return epoch;
}

void Group::send_abort(CallState& call, FailureKind kind, const std::string& text) {
  CallHeader header = new_header(call.epoch, kind::ABORT);
  header.reason = static_cast<int32_t>(kind);
  const std::string sent = clip_text(text, layout_[RECORD_PAYLOAD_BYTES]);
  if (dropped(Rule::ABORT_INSTEAD_OF_RECORD)) {
    publish(call.epoch, call.header, call.counts.data(), layout_[NUM_EXPERTS] * 4);
    at_point("abort");
  }
  publish(call.epoch, header, sent.data(), static_cast<int64_t>(sent.size()));
  fail(call, kind, text);
  progress(phase::IDLE);
  throw Failure(kind, text);
}

void Group::send_call(const DispatchInput& input, CallState& call) {
  const uint64_t epoch = call.epoch;
  const int64_t experts = layout_[NUM_EXPERTS];
  std::string bad = input.bad;
  FailureKind bad_kind = input.bad_kind;
  if (bad.empty()) {
    try {
      call.counts.resize(static_cast<size_t>(experts));
      call.start.resize(static_cast<size_t>(experts));
      if (input.routing != nullptr) {
        bad = read_routing(input, call);
      } else {
        call.tokens = input.idx.tokens;
        call.top_k = input.idx.top_k;
        call.expert.resize(static_cast<size_t>(call.tokens * call.top_k));
        call.slot.resize(static_cast<size_t>(call.tokens * call.top_k));
        const BadId id = send_counts(input.idx, experts, call.counts.data(), call.slot.data(), call.expert.data());
        if (id.found)
          bad = say("%s: topk_idx[%ld, %ld] = %ld is outside -1..%ld on rank %ld (num_experts = %ld); ids must be global expert "
                    "ids, or -1 for no expert",
                    call.operation, id.token, id.k, id.value, experts - 1, rank_, experts);
      }
      if (!bad.empty()) bad_kind = FailureKind::BAD_VALUE;
    } catch (const std::bad_alloc&) {
      call.slot = {};
      bad = say("%s: no memory on rank %ld to sort the pairs of %ld tokens", call.operation, rank_, input.x.rows);
      bad_kind = FailureKind::OUT_OF_MEMORY;
    }
  }
  if (!dropped(Rule::CLEAR_BEFORE_RECORD)) clear_lap(epoch);
  if (!bad.empty()) send_abort(call, bad_kind, bad);

  call.hidden = input.hidden;
  call.dtype = input.dtype;
  call.weight_dtype = input.weights.dtype;
  const bool quantised = input.quant != Quant::NONE;
  call.wire = Wire::of(quantised ? input.hidden : input.hidden * itemsize(input.dtype), scales_per_row(input.quant, input.hidden),
                       itemsize(input.weights.dtype));
  const Wire& wire = call.wire;
  char* list = own() + layout_.list_at(epoch);
  char* weight_list = own() + layout_.weight_at(epoch);
  pack_lists(call.expert.data(), call.slot.data(), call.counts.data(), call.tokens, call.top_k, experts, call.start.data(),
             reinterpret_cast<int32_t*>(list), static_cast<const char*>(input.weights.data), wire.weight_bytes,
             input.weights.token_stride * wire.weight_bytes, input.weights.k_stride * wire.weight_bytes, weight_list);

  CallHeader& header = call.header;
  header.tokens = call.tokens;
  header.hidden = input.hidden;
  header.dtype = static_cast<int32_t>(input.dtype);
  header.weight_dtype = static_cast<int32_t>(input.weights.dtype);
  header.top_k = call.top_k;
  header.tag = input.tag;
  header.quant = static_cast<int32_t>(input.quant);
  header.pad_to = input.pad_to;
  header.async = input.async ? 1 : 0;
  header.align = static_cast<int32_t>(input.align);
  header.gradients = input.gradients;
  if (!input.round) header.ids = ids_digest(call.expert.data(), call.tokens * call.top_k);
  if (input.round) header.align = static_cast<int32_t>(input.routing[handle_word::ALIGN]);
  if (input.routing != nullptr)
    header.routing = routing_digest(call.matrix.data(), static_cast<int64_t>(call.matrix.size()),
                                    static_cast<uint64_t>(input.routing[handle_word::EPOCH]));

  int64_t leaves = 0;
  for (int64_t e = 0; e < experts; ++e)
    if (e < local_begin_ || e >= local_end_) leaves += call.counts[static_cast<size_t>(e)];
  // A push needs the peers' records, so it would keep a caller waiting who asked not to. A round has no rows.
  const bool push = !input.async && !input.fused && !input.round &&
                    choose_push(leaves * wire.push_bytes, tiling_.dispatch_push_below, tiling_.dispatch_push_from, epoch, 0);
  header.mode = static_cast<int32_t>(input.fused ? Mode::FUSED : push ? Mode::PUSH : Mode::PULL);
  header.flag_rows = static_cast<int32_t>(push || input.fused ? tiling_.flag_rows : 0);

  // x that lies in the window already is read where it is. Only where the peers will find it so, too: a view that leaves its
  // region, or whose rows are further apart than the record's 32 bits can say, is copied like any other tensor.
  const char* stage_begin = own() + layout_.stage_at(0);
  const char* stage_end = stage_begin + layout_[STAGE_SLOTS] * layout_[X_SLOT_STRIDE];
  const bool staged = !quantised && !input.round && input.x.rows > 0 && input.x.data >= stage_begin && input.x.data < stage_end &&
                      (input.x.rows == 1 || input.x.stride <= std::numeric_limits<int32_t>::max()) &&
                      rows_fit(input.x.data - own(), input.x.stride, input.x.rows, input.x.row_bytes, layout_[X], layout_[Y]);
  call.own = {input.x.data, input.x.stride, call.tokens, reinterpret_cast<const int32_t*>(list), weight_list};
  header.x_offset = layout_.x_at(epoch);
  header.x_stride = layout_.row_stride(wire.pull_bytes);
  char* slot = own() + header.x_offset;
  if (staged) {
    header.x_offset = input.x.data - own();
    header.x_stride = input.x.rows == 1 ? layout_.row_stride(input.x.row_bytes) : input.x.stride;
    std::lock_guard guard(stage_mutex_);
    stages_[static_cast<size_t>((input.x.data - stage_begin) / layout_[X_SLOT_STRIDE])].used_in = epoch;
  } else if (quantised) {
    const QuantizeRow quantize = kernels_.quantize[static_cast<int>(input.quant)][static_cast<int>(input.dtype)];
    counters_.dispatch_in_bytes +=
        quantize_rows(quantize, input.x, input.hidden, call.expert.data(), call.top_k, wire, slot, header.x_stride);
    call.own.x = slot;
    call.own.stride = header.x_stride;
  } else if (!push && !input.fused && !input.round) {
    // Without async the own rows are taken from x itself.
    const int64_t begin = input.async ? 0 : local_begin_, end = input.async ? 0 : local_end_;
    counters_.dispatch_in_bytes +=
        pack_rows(kernels_, input.x, call.expert.data(), call.top_k, begin, end, slot, header.x_stride);
    if (input.async) {
      call.own.x = slot;
      call.own.stride = header.x_stride;
    }
  }
  if (dropped(Rule::RECORDS_BEFORE_Y))  // as if an eager expert wrote before dispatch has returned
    std::memset(own() + layout_.y_at(epoch), 0xff, static_cast<size_t>(layout_[Y_SLOT_STRIDE]));
  call.stage = Stage::SENT;
  at_point("before records");
  if (!(dropped(Rule::REUSE_HAS_RECORDS) && header.routing != 0))
    publish(epoch, header, call.counts.data(), header.routing != 0 ? 0 : experts * 4);
  if (dropped(Rule::CLEAR_BEFORE_RECORD)) {
    at_point("lap");
    clear_lap(epoch);
  }
  if (dropped(Rule::RECORDS_BEFORE_ROWS) && push && header.routing != 0) {
    call.base.resize(static_cast<size_t>(experts));
    call.totals.resize(static_cast<size_t>(layout_[WORLD_SIZE]));
    row_bases(call.matrix.data(), layout_[WORLD_SIZE], experts, rank_, header.align, call.base.data(), call.totals.data());
    call.waves = 1;
    push_wave(call, 0, false);
  }
  // The rows of rank 0 for an owner's first expert are the only ones whose place hangs on no record.
  if (dropped(Rule::RECORDS_BEFORE_ROWS) && input.fused && rank_ == 0)
    for (int64_t owner : all_peers_) {
      const int64_t e = first_expert(owner, experts, layout_[WORLD_SIZE]), rows = call.counts[static_cast<size_t>(e)];
      const Run run{0, std::min(rows, layout_[RECV_ROWS])};
      push_rows(kernels_, layout_, call.own, call.start[static_cast<size_t>(e)], wire, false,
                landing(call, window(owner), 0, run, header.flag_rows));
    }
}

void Group::check_pending_dispatch(int64_t group, uint64_t epoch) const {
  enter(DISPATCH);
  if (group != group_id_)
    throw Failure(FailureKind::BAD_VALUE, say("%s: what is waited for on rank %ld belongs to another group than %s", DISPATCH,
                                              rank_, name_.c_str()));
  const CallState& call = state(epoch);
  if (call.epoch == epoch && epoch != 0 &&
      (call.stage == Stage::SENT || call.stage == Stage::MET || call.stage == Stage::FAILED))
    return;
  if (epoch > epoch_)
    throw Failure(FailureKind::BAD_VALUE, say("%s: what is waited for on rank %ld was written to", DISPATCH, rank_));
  throw Failure(FailureKind::HANDLE_EXPIRED,
                call.epoch == epoch && call.stage != Stage::CLOSED
                    ? say("%s: call %lu on rank %ld was waited for already", DISPATCH, epoch, rank_)
                    : say("%s: call %lu on rank %ld has expired: %lu newer dispatches have started and the group's depth is %ld. "
                          "Wait for it earlier or make the group with a larger depth",
                          DISPATCH, epoch, rank_, epoch_ - epoch, layout_[SLOTS]));
}

Group::DispatchPlan Group::meet_dispatch(uint64_t epoch) {
  CallState& call = state(epoch);
  try {
    hear(epoch, epoch, call.operation);
  } catch (const Failure&) {
    progress(phase::IDLE);
    throw;
  }
  if (call.stage == Stage::FAILED) {
    progress(phase::IDLE);
    throw Failure(call.failure_kind, call.failure);
  }
  matrix_ = call.matrix;  // same size each time: no allocation after the first
  progress(phase::DISPATCH_ROWS);
  const int64_t rows = call.totals[static_cast<size_t>(rank_)];
  return {epoch, call.header.pad_to >= 0 ? call.header.pad_to : rows, call.wire.data_bytes, call.wire.scale_bytes / 4,
          call.weight_dtype,
          HandleWords(call.tokens * call.top_k, layout_[WORLD_SIZE], layout_[NUM_EXPERTS], local_end_ - local_begin_).total};
}

// ---------------------------------------------------------------------------------------------------------- receive

int64_t Group::rows_between(const CallState& call, int64_t source, int64_t owner) const {
  const int64_t experts = layout_[NUM_EXPERTS], ranks = layout_[WORLD_SIZE];
  int64_t rows = 0;
  const int64_t end = first_expert(owner + 1, experts, ranks);
  for (int64_t e = first_expert(owner, experts, ranks); e < end; ++e)
    rows += call.matrix[static_cast<size_t>(source * experts + e)];
  return rows;
}

Landing Group::landing(const CallState& call, char* window, int64_t wave, const Run& run, int64_t flag_rows) const {
  // In a fused call the owner's y takes the rows: its slot is free for the same reason, and at the same time.
  const bool fused = call.header.mode == static_cast<int32_t>(Mode::FUSED);
  const int64_t stride = fused ? layout_.row_stride(call.wire.push_bytes) : layout_.remote_stride(call.wire.push_bytes);
  const int64_t at = run.begin - wave * layout_[RECV_ROWS];
  char* flags = window + layout_.row_flag_at(call.epoch) + at * layout_[ROW_FLAG_STRIDE];
  return {window + (fused ? layout_.y_at(call.epoch) : layout_.row_at(call.epoch)) + at * stride,
          layout_.line() ? nullptr : flags,
          stride,
          layout_[ROW_FLAG_STRIDE],
          run.size(),
          flag_rows,
          layout_.code(call.epoch)};
}

void Group::push_wave(CallState& call, int64_t wave, bool streaming) {
  for (int64_t owner : all_peers_) {
    if (!has_rows_in_wave(call, rank_, owner, wave)) continue;
    if (wave > 0 && !dropped(Rule::WAVE_IS_READ))
      await_peers({owner}, call.epoch, call.operation, phase::DISPATCH_PUSH, [&](int64_t peer) {
        return mark_here(layout_, own(), call.epoch, Wave::DISPATCH_READ, peer, wave);
      });
    for_each_run(call, rank_, owner, wave, layout_[RECV_ROWS], [&](int64_t e, int64_t first_row, const Run& run) {
      const int64_t first = call.start[static_cast<size_t>(e)] + run.begin - first_row;
      counters_.dispatch_push_bytes += push_rows(kernels_, layout_, call.own, first, call.wire, streaming,
                                                 landing(call, window(owner), wave, run, call.header.flag_rows));
    });
  }
}

void Group::take_wave(CallState& call, int64_t wave, bool streaming, const Received& out) {
  std::vector<int64_t> pushing;
  for (int64_t source : all_peers_)
    if (call.flag_rows[static_cast<size_t>(source)] >= 0) pushing.push_back(source);
  if (pushing.empty()) return;
  await_peers(pushing, call.epoch, call.operation, phase::DISPATCH_ROWS, [&](int64_t source) {
    const int64_t flag_rows = call.flag_rows[static_cast<size_t>(source)];
    bool here = true;
    for_each_run(call, source, rank_, wave, layout_[RECV_ROWS], [&](int64_t, int64_t, const Run& run) {
      here = here && rows_here(layout_, landing(call, own(), wave, run, flag_rows), call.wire);
    });
    if (!here) return false;
    at_point("take rows");
    for_each_run(call, source, rank_, wave, layout_[RECV_ROWS], [&](int64_t, int64_t, const Run& run) {
      counters_.dispatch_out_bytes += moe_a2a::take_rows(kernels_, layout_, landing(call, own(), wave, run, flag_rows), call.wire,
                                                         streaming, run.begin, out);
    });
    return true;
  });
  if (streaming) kernels_.fence();
  if (wave + 1 == call.waves) return;
  const auto read = [&] {
    at_point("wave read");
    for (int64_t source : pushing)
      if (rows_between(call, source, rank_) > 0)
        write_mark(layout_, window(source), call.epoch, Wave::DISPATCH_READ, rank_, wave + 1);
  };
  if (dropped(Rule::CLEAR_BEFORE_WAVE_READ)) read();
  at_point("wave clear");
  if (!dropped(Rule::WAVE_IS_CLEARED))
    for (int64_t source : pushing)
      for_each_run(call, source, rank_, wave, layout_[RECV_ROWS], [&](int64_t, int64_t, const Run& run) {
        clear_rows(layout_, landing(call, own(), wave, run, call.flag_rows[static_cast<size_t>(source)]), call.wire);
      });
  if (!dropped(Rule::CLEAR_BEFORE_WAVE_READ)) read();
}

void Group::receive_dispatch(const DispatchPlan& plan, const Received& out, int64_t* handle) {
  CallState& call = state(plan.epoch);
  const int64_t ranks = layout_[WORLD_SIZE], experts = layout_[NUM_EXPERTS], local = local_end_ - local_begin_;
  const bool push = call.header.mode != static_cast<int32_t>(Mode::PULL);
  const bool streaming = plan.rows * plan.row_bytes >= tiling_.streaming_bytes;
  const bool pushed_already = dropped(Rule::RECORDS_BEFORE_ROWS) && push && call.header.routing != 0;
  for (int64_t wave = 0; wave < call.waves; ++wave) {
    if (push && !pushed_already)
      push_wave(call, wave, leaving_rows(call) * call.wire.push_bytes >= tiling_.streaming_bytes);
    if (wave == 0) {
      at_point("before gather");
      const Gathered gathered = gather_rows(kernels_, call.matrix.data(), ranks, experts, local_begin_, local_end_,
                                            call.offsets.data(), call.sources.data(), call.wire, streaming, out);
      counters_.dispatch_out_bytes += gathered.bytes;
      if (gathered.source >= 0)
        lose({FailureKind::PEER_LOST, gathered.source,
              say("%s, call %lu on rank %ld: the token list of rank %ld names a token it doesn't have", call.operation, plan.epoch,
                  rank_, gathered.source)},
             plan.epoch, phase::DISPATCH_ROWS);
    }
    take_wave(call, wave, streaming, out);
  }
  if (plan.rows != call.totals[static_cast<size_t>(rank_)] || call.header.align > 1)
    zero_padding(call.local_counts.data(), call.offsets.data(), local, plan.rows, call.wire, out);
  write_handle(call, plan, handle);
  finish_dispatch(call);
}

// Rows of this rank's tokens that go to experts of another one.
int64_t Group::leaving_rows(const CallState& call) const {
  int64_t rows = 0;
  for (int64_t e = 0; e < layout_[NUM_EXPERTS]; ++e)
    if (e < local_begin_ || e >= local_end_) rows += call.counts[static_cast<size_t>(e)];
  return rows;
}

// What combine needs of the call, as a tensor's words.
void Group::write_handle(const CallState& call, const DispatchPlan& plan, int64_t* handle) const {
  namespace w = handle_word;
  const int64_t ranks = layout_[WORLD_SIZE], experts = layout_[NUM_EXPERTS], local = local_end_ - local_begin_;
  const int64_t rows = call.totals[static_cast<size_t>(rank_)];
  const int64_t pairs = call.tokens * call.top_k;
  const HandleWords words(pairs, ranks, experts, local);
  std::memset(handle, 0, HANDLE_HEADER_WORDS * sizeof(int64_t));
  handle[w::MAGIC] = HANDLE_MAGIC;
  handle[w::EPOCH] = static_cast<int64_t>(plan.epoch);
  handle[w::GENERATION] = layout_[GENERATION];
  handle[w::TOKENS] = call.tokens;
  handle[w::TOP_K] = call.top_k;
  handle[w::HIDDEN] = call.hidden;
  handle[w::ROWS] = rows;
  handle[w::WORLD_SIZE] = ranks;
  handle[w::NUM_EXPERTS] = experts;
  handle[w::RANK] = rank_;
  handle[w::DTYPE] = static_cast<int64_t>(call.dtype);
  handle[w::GROUP] = group_id_;
  handle[w::ALIGN] = call.header.align;
  handle[w::OUT_ROWS] = plan.rows;
  handle[w::GRADIENTS] = call.gradients;
  handle[w::COUNTS] = words.counts;
  handle[w::OFFSETS] = words.offsets;
  handle[w::MATRIX] = words.matrix;
  handle[w::EXPERT] = words.expert;
  handle[w::ROW] = words.row;
  handle[w::IDS] = words.ids;
  if (words.ids > words.row) handle[words.ids - 1] = 0;  // a last int32 without a partner
  auto* offsets = reinterpret_cast<int32_t*>(handle + words.offsets);
  if (local % 2 == 0) offsets[local + 1] = 0;
  std::memcpy(offsets, call.offsets.data(), static_cast<size_t>(local + 1) * 4);
  for (int64_t e = 0; e < local; ++e) handle[words.counts + e] = call.local_counts[static_cast<size_t>(e)];
  auto* matrix = reinterpret_cast<int32_t*>(handle + words.matrix);
  if (ranks * experts % 2 != 0) matrix[ranks * experts] = 0;
  std::memcpy(matrix, call.matrix.data(), static_cast<size_t>(ranks * experts) * 4);
  auto* expert = reinterpret_cast<int32_t*>(handle + words.expert);
  auto* row = reinterpret_cast<int32_t*>(handle + words.row);
  std::copy(call.ids.begin(), call.ids.end(), handle + words.ids);
  if (pairs % 2 != 0) expert[pairs] = 0;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int32_t e = call.expert[static_cast<size_t>(pair)];
    expert[pair] = e;
    row[pair] = e < 0 ? -1 : call.base[static_cast<size_t>(e)] + call.slot[static_cast<size_t>(pair)];
  }
}

// The rows are with the caller.
void Group::finish_dispatch(CallState& call) {
  const int64_t local = local_end_ - local_begin_, leave = leaving_rows(call);
  int64_t stay = 0, received = 0;
  for (int64_t e = 0; e < local; ++e) {
    const int64_t rows = call.local_counts[static_cast<size_t>(e)];
    expert_rows_[static_cast<size_t>(e)] += rows;
    received += rows;
    stay += call.counts[static_cast<size_t>(local_begin_ + e)];
  }
  call.stage = Stage::OPEN;
  note_read();
  ++counters_.dispatches;
  counters_.pushes += call.header.mode != static_cast<int32_t>(Mode::PULL) ? 1 : 0;
  counters_.waves += call.waves;
  counters_.sent_rows += leave;
  counters_.received_rows += received - stay;
  write_verdict(layout_, own(), 0);
  progress(phase::IDLE);
}

// ------------------------------------------------------------------------------------------------------------- rounds

uint64_t Group::open_round(const DispatchInput& input, int64_t y_rows) {
  const uint64_t epoch = send_dispatch(input);
  CallState& call = state(epoch);
  meet_dispatch(epoch);
  call.stage = Stage::OPEN;
  note_read();
  progress(phase::IDLE);
  // The handle is a tensor, and what it says of the rows is believed only as far as it goes with the matrix.
  if (y_rows < call.totals[static_cast<size_t>(rank_)]) {
    CombineInput refused;
    refused.bad_y = say("%s: routing on rank %ld is a handle that was written to after dispatch returned it", call.operation, rank_);
    refused.bad_kind = FailureKind::BAD_VALUE;
    give_rows(epoch, refused);
  }
  return epoch;
}

// -------------------------------------------------------------------------------------------------------- fused calls

void Group::check_fused(uint64_t epoch) const {
  if (state(epoch).header.mode != static_cast<int32_t>(Mode::FUSED))
    throw Failure(FailureKind::BAD_VALUE, say("%s: the handle of call %lu on rank %ld is a dispatch's, whose rows are with the caller",
                                              MOE, epoch, rank_));
}

bool Group::fits(uint64_t epoch) const { return state(epoch).waves == 1; }

Group::ExpertRows Group::expert_rows(uint64_t epoch, char* spill) const {
  const CallState& call = state(epoch);
  if (!fits(epoch)) return {spill, call.wire.data_bytes, call.offsets.data()};
  return {own() + layout_.y_at(epoch), layout_.row_stride(call.wire.push_bytes), call.offsets.data()};
}

Group::ExpertRows Group::begin_experts(const DispatchPlan& plan, char* spill, int64_t* handle) {
  CallState& call = state(plan.epoch);
  for (int64_t e = 0; e < local_end_ - local_begin_; ++e)
    if (call.local_counts[static_cast<size_t>(e)] > 0) call.waiting.push_back(static_cast<int32_t>(e));
  if (fits(plan.epoch)) {
    // The peers' first: they may be waiting for them.
    const bool streaming = leaving_rows(call) * call.wire.push_bytes >= tiling_.streaming_bytes;
    push_wave(call, 0, streaming);
    for_each_run(call, rank_, rank_, 0, layout_[RECV_ROWS], [&](int64_t e, int64_t, const Run& run) {
      counters_.dispatch_out_bytes += push_rows(kernels_, layout_, call.own, call.start[static_cast<size_t>(e)], call.wire,
                                                false, landing(call, own(), 0, run, 0));
    });
    write_handle(call, plan, handle);
    finish_dispatch(call);
  } else {
    receive_dispatch(plan, {spill, nullptr, nullptr}, handle);
  }
  return expert_rows(plan.epoch, spill);
}

bool Group::expert_here(const CallState& call, int64_t local) const {
  if (call.waves > 1) return true;  // copied out already
  int64_t row = call.offsets[static_cast<size_t>(local)];
  for (int64_t source = 0; source < layout_[WORLD_SIZE]; ++source) {
    const int64_t count = call.matrix[static_cast<size_t>(source * layout_[NUM_EXPERTS] + local_begin_ + local)];
    const Landing run = landing(call, own(), 0, {row, row + count}, call.flag_rows[static_cast<size_t>(source)]);
    if (source != rank_ && count > 0 && !rows_here(layout_, run, call.wire)) return false;
    row += count;
  }
  return true;
}

// Are all rows of `source` in the window?
bool Group::source_here(const CallState& call, int64_t source) const {
  bool here = true;
  for_each_run(call, source, rank_, 0, layout_[RECV_ROWS], [&](int64_t, int64_t, const Run& run) {
    here = here && rows_here(layout_, landing(call, own(), 0, run, call.flag_rows[static_cast<size_t>(source)]), call.wire);
  });
  return here;
}

int64_t Group::next_expert(uint64_t epoch) {
  CallState& call = state(epoch);
  if (call.waiting.empty()) return -1;
  size_t found = call.waiting.size();
  const auto any_here = [&] {
    for (found = 0; found < call.waiting.size(); ++found)
      if (dropped(Rule::EXPERT_HAS_ALL_ROWS) || expert_here(call, call.waiting[found])) return true;
    return false;
  };
  if (!any_here()) {
    progress(phase::DISPATCH_ROWS);
    bool any = false;
    await_peers(all_peers_, epoch, call.operation, phase::DISPATCH_ROWS, [&](int64_t source) {
      any = any || any_here();
      return any || source_here(call, source);
    });
    if (!any) any_here();
    progress(phase::IDLE);
  }
  at_point("expert");
  const int32_t expert = call.waiting[found];
  call.waiting.erase(call.waiting.begin() + static_cast<std::ptrdiff_t>(found));
  call.order.push_back(expert);
  {
    // Whole lists only, and under the lock that their readers in other threads take.
    std::lock_guard guard(stage_mutex_);
    expert_order_ = call.order;
  }
  return expert;
}

void Group::abort_call(FailureKind kind, const std::string& text) {
  DispatchInput input;
  input.bad = text;
  input.bad_kind = kind;
  try {
    send_dispatch(input);
  } catch (const Failure& failure) {
    if (failure.kind != kind) throw;
  }
}

}  // namespace moe_a2a
