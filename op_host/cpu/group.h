// A group of ranks that share windows: the call counter, the handles, who is here and who is lost, and the two operations on
// raw memory. Nothing of torch in here; bindings.cpp turns tensors into what this takes.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../../op_kernel/cpu/combine.h"
#include "../../op_kernel/cpu/dispatch.h"
#include "../../op_kernel/cpu/push.h"
#include "../../op_kernel/cpu/record.h"
#include "../../op_kernel/cpu/route.h"
#include "../../op_kernel/cpu/rows.h"
#include "../../op_kernel/cpu/wait.h"
#include "../../op_kernel/cpu/wave.h"
#include "failure.h"

namespace moe_a2a {

constexpr const char* DISPATCH = "moe_a2a.dispatch";
constexpr const char* COMBINE = "moe_a2a.combine";
constexpr const char* MOE = "moe_a2a.moe";
constexpr const char* BACKWARD = "moe_a2a (backward)";

// A mapped window; unmapped when the last one who needs it (the group, or a tensor that lies in it) lets go.
struct Mapping {
  Mapping(char* address, int64_t bytes) : address(address), bytes(bytes) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  char* address;
  int64_t bytes;
};

struct Tiling {
  WaitPolicy wait;
  int64_t streaming_bytes;      // what is at least this size is written past the cache
  int64_t dispatch_push_below;  // a source pushes when fewer bytes than this leave it,
  int64_t dispatch_push_from;   // or at least this many
  int64_t combine_push_below;   // the same for an owner in combine
  int64_t combine_push_from;
  int64_t flag_rows;            // pushed rows (also of fused calls) that share a flag, 0: all of an expert
  int64_t mix;                  // for tests: not 0, push and pull by chance, with this seed
};
constexpr int TILING_PARAMS = 10;

// What a group counts. Read by EPGroup.stats().
struct Counters {
  int64_t dispatches;
  int64_t combines;
  int64_t dispatch_in_bytes;   // payload copied into the window by dispatch
  int64_t dispatch_out_bytes;  // payload copied into dispatch's output
  int64_t combine_in_bytes;    // payload copied into the window by combine
  int64_t combine_out_bytes;   // payload written to combine's output
  int64_t dispatch_push_bytes; // payload written into peers' windows by dispatch
  int64_t combine_push_bytes;  // the same by combine
  int64_t pushes;              // dispatches and combines in which this rank pushed
  int64_t waves;               // that dispatches took, and combines that took more than one
  int64_t sent_rows;           // rows that went to another rank
  int64_t received_rows;       // rows that came from another rank
};

class Group {
 public:
  Group(std::string name, const Layout& layout, int64_t rank, const Tiling& tiling, std::vector<std::shared_ptr<Mapping>> windows,
        std::vector<int> pidfds, int64_t timeout_ns, int64_t warmup_ns, uint64_t first_epoch);
  ~Group();

  // One call at a time: others wait for it, hearing signals. Not a mutex that is held during a call: signal handlers run inside
  // waits, other threads close the group, and processes fork, all while a call is under way.
  class Call {
   public:
    Call(Group& group, const char* operation);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Group& group_;
  };

  // ---- dispatch, in three steps: send, hear of all, receive. The size of the output is known after the second.
  struct DispatchInput {
    const char* operation = DISPATCH;  // what the user called, for messages
    std::string bad;         // why the arguments can't be used; empty when they can
    FailureKind bad_kind = FailureKind::BAD_VALUE;
    RowsView x{};
    int64_t hidden = 0;
    Dtype dtype = Dtype::NONE;
    TopkIdx idx{};
    Weights weights{};       // strides in elements
    int64_t tag = 0;
    int64_t pad_to = -1;     // rows of the output, -1: as many as come
    int64_t align = 1;
    Quant quant = Quant::NONE;
    const int64_t* routing = nullptr;  // the handle of a dispatch whose routing is used again; idx is empty then
    int64_t routing_words = 0;
    bool async = false;      // x, unless it lies in the window, is not looked at again after send_dispatch
    bool fused = false;      // rows go straight into the owners' y, to be computed there
    bool round = false;      // no rows: opens a call in which the rows of `routing` are combined again
    int32_t gradients = 0;   // bits of what this rank wants gradients of; and see COMBINE_WEIGHTS
  };
  struct DispatchPlan {
    uint64_t epoch;
    int64_t rows;          // of the output
    int64_t row_bytes;     // of its elements
    int64_t scales;        // float scales a row
    Dtype weight_dtype;
    int64_t handle_words;  // of the handle tensor
  };
  // Tells the peers; returns n. What is wrong on this rank raises here, after the peers were told just that.
  uint64_t send_dispatch(const DispatchInput& input);
  // Waits for what the peers say, and judges it.
  DispatchPlan meet_dispatch(uint64_t epoch);
  // Sends what is pushed, receives everything.
  void receive_dispatch(const DispatchPlan& plan, const Received& out, int64_t* handle);
  struct RowType {
    Dtype dtype;
    Quant quant;
  };
  RowType row_type(uint64_t epoch) const {
    return {state(epoch).dtype, static_cast<Quant>(state(epoch).header.quant)};
  }
  // ---- a round: after meet_dispatch of an input with `round` the call can be combined.
  // Returns n. `y_rows`: rows of the y that will be given, which must be what the routing's dispatch returned.
  uint64_t open_round(const DispatchInput& input, int64_t y_rows);

  // ---- the fused call: after meet_dispatch of an input with `fused`, begin_experts, then next_expert until it returns -1, then
  // combine. Between them rows [offsets[e], offsets[e + 1]) of `rows` are expert e's, and its results may take their places.
  struct ExpertRows {
    char* rows;            // in the window, or `spill` where more came than it holds
    int64_t stride;        // bytes from row to row
    const int32_t* offsets;  // [E_local + 1]
  };
  // Do the rows of a met call fit the window?
  bool fits(uint64_t epoch) const;
  int64_t call_hidden(uint64_t epoch) const { return state(epoch).hidden; }
  int32_t gradients(uint64_t epoch) const { return state(epoch).gradients; }
  ExpertRows begin_experts(const DispatchPlan& plan, char* spill, int64_t* handle);
  // The same again for a call that has begun.
  ExpertRows expert_rows(uint64_t epoch, char* spill) const;
  // Throws BadValue unless call `epoch` is a fused one.
  void check_fused(uint64_t epoch) const;
  // A local expert with rows, all of which are there and which wasn't returned before; -1 when there is none left. Waits while
  // none is ready.
  int64_t next_expert(uint64_t epoch);
  // Copies rows of the window, packed, to memory of the caller.
  void copy_out(const RowsView& rows, char* to) {
    counters_.dispatch_out_bytes += copy_rows(kernels_, rows, 0, rows.rows, to, rows.row_bytes, false, 0);
  }
  std::shared_ptr<Mapping> own_window() const { return windows_[static_cast<size_t>(rank_)]; }

  // Throws HandleExpired unless call `epoch` was sent and isn't received yet.
  void check_pending_dispatch(int64_t group, uint64_t epoch) const;

  // ---- combine, in two steps: give, take
  struct CombineInput {
    std::string bad_y, bad_sum;  // bad_sum: y is good and goes out, but this rank can't sum
    FailureKind bad_kind = FailureKind::BAD_VALUE;
    RowsView y{};
    Dtype dtype = Dtype::NONE;
    int64_t hidden = 0;
    const int64_t* handle = nullptr;
    int64_t handle_words = 0;
    bool async = false;          // y, unless it lies in the window, is not looked at again after give_rows
  };
  // Throws HandleExpired or GroupClosed before anything else. Inside a Call, like everything up to here.
  void check_handle(const int64_t* handle, int64_t words, const char* operation = "moe_a2a.combine") const;
  void give_rows(uint64_t epoch, const CombineInput& input);
  struct CombineShape {
    int64_t tokens, top_k, hidden;
    Dtype dtype;
  };
  // Throws HandleExpired unless the rows of call `epoch` were given and aren't taken yet.
  CombineShape check_pending_combine(int64_t group, uint64_t epoch) const;
  // bad: why this rank can't sum; the peers have its rows, so it raises alone.
  // pairs: out is [T, K, H], the rows as they are.
  void take_rows(uint64_t epoch, const Weights& weights, const std::string& bad, FailureKind bad_kind, char* out,
                 bool pairs = false);
  int64_t id() const { return group_id_; }

  // ---- tensors in the window
  // The address of a free x slot; release_stage gives it back when its tensor is gone.
  // The memory stays mapped while `window` is held, also after the group has closed.
  char* take_stage(int64_t tokens, int64_t row_bytes, int64_t* slot, std::shared_ptr<Mapping>* window);
  void release_stage(int64_t slot);
  char* rows_at(const int64_t* handle, int64_t words, int64_t row_bytes, std::shared_ptr<Mapping>* window);

  // A tensor whose columns weren't packed was copied before it came here.
  void count_repacked(bool dispatch, int64_t bytes) {
    (dispatch ? counters_.dispatch_in_bytes : counters_.combine_in_bytes) += bytes;
  }

  // ---- life
  // Uses up the next call on all ranks: they raise PeerAborted with this text.
  void abort_call(FailureKind kind, const std::string& text);
  // For a failure of this rank alone in the middle of a call: the peers raise at once instead of waiting.
  void give_up(uint64_t epoch, const std::string& text);
  // Ends a call that waits in another thread, or in this one below a signal handler; idempotent.
  void close();

  const std::string& name() const { return name_; }
  const Layout& layout() const { return layout_; }
  int64_t rank() const { return rank_; }
  int64_t local_begin() const { return local_begin_; }
  int64_t local_end() const { return local_end_; }
  // These may be a call apart from each other while a call is under way; nobody waits for it to see them.
  const Counters& counters() const { return counters_; }
  uint64_t epoch() const { return epoch_; }
  bool pushes() const { return layout_[PUSH] != 0; }
  const std::vector<int64_t>& waited_ns() const { return waited_ns_; }
  const std::vector<int32_t>& matrix() const { return matrix_; }
  const std::vector<int64_t>& expert_rows() const { return expert_rows_; }
  // Local experts in the order in which the fused call that went on last has computed them so far.
  std::vector<int32_t> expert_order() const {
    std::lock_guard guard(stage_mutex_);
    return expert_order_;
  }

 private:
  // One call, from its send to the end of its combine. It lives in slot n mod NS; what is decided from it must not hang on a
  // tensor that can be written to.
  enum class Stage {
    UNUSED,
    SENT,      // its record is out
    MET,       // all records are here and go together
    FAILED,    // it ended with an error
    OPEN,      // its rows are with the caller
    GIVEN,     // combine has given this rank's rows
    CLOSED,
  };
  struct CallState {
    uint64_t epoch = 0;
    Stage stage = Stage::UNUSED;
    std::string failure;
    FailureKind failure_kind = FailureKind::BAD_VALUE;
    const char* operation = DISPATCH;  // what the user called
    const char* combining = COMBINE;   // and what takes the rows back
    CallHeader header{};
    int64_t hidden = 0;
    Dtype dtype = Dtype::NONE, weight_dtype = Dtype::NONE;
    Wire wire{};
    int64_t tokens = 0, top_k = 0;
    Source own{};                      // where this rank's own rows are for itself and for pushing
    std::vector<int32_t> counts, expert, slot, start;  // this rank's routing
    std::vector<int32_t> matrix;       // C [R, E]
    std::vector<int32_t> base;         // [E]: see row_bases
    std::vector<int64_t> totals;       // [R] rows each rank receives
    std::vector<int32_t> offsets;      // [E_local + 1]
    std::vector<int64_t> local_counts; // [E_local]
    std::vector<Source> sources;       // [R]
    std::vector<int64_t> flag_rows;    // [R]: -1 pulls, else pushes with so many rows a flag
    std::vector<int64_t> pads;         // [R]
    int64_t waves = 1;                 // of its pushed rows
    int32_t gradients = 0;             // what some rank wants
    std::vector<int64_t> ids;          // [R]: digests of the sources' topk_idx
    std::vector<int32_t> waiting;      // fused: local experts with rows that next_expert hasn't returned
    std::vector<int32_t> order;        // and those it has
    // combine
    int64_t y_hidden = 0;
    Dtype y_dtype = Dtype::NONE;
    std::vector<Place> places;         // [E]
    std::vector<int64_t> holders;      // ranks that hold rows of this one
    std::vector<char> staged;          // rows that came in waves
    bool taken_in_waves = false;
  };

  void enter(const char* operation) const;
  void check_fork(const char* operation) const;
  void leave_windows();
  CallState& state(uint64_t epoch) { return calls_[static_cast<size_t>(epoch % static_cast<uint64_t>(layout_[SLOTS]))]; }
  const CallState& state(uint64_t epoch) const { return const_cast<Group*>(this)->state(epoch); }
  void publish(uint64_t epoch, const CallHeader& header, const void* payload, int64_t payload_bytes);
  // Waits for the records of all peers up to call `epoch` and keeps what they say. Throws what ended call `asked`, at the first
  // abort; what ended another one is kept for whoever asks.
  void hear(uint64_t epoch, uint64_t asked, const char* operation);
  void hear_one(uint64_t epoch, bool asked, const char* operation);
  void judge(CallState& call);
  // Ends what call n - NS may still have under way, so that its slot can be used.
  void end_call_before(uint64_t epoch);
  void fail(CallState& call, FailureKind kind, const std::string& text);
  void note_read();
  void send_call(const DispatchInput& input, CallState& call);
  [[noreturn]] void send_abort(CallState& call, FailureKind kind, const std::string& text);
  void write_handle(const CallState& call, const DispatchPlan& plan, int64_t* handle) const;
  void finish_dispatch(CallState& call);
  int64_t leaving_rows(const CallState& call) const;
  bool expert_here(const CallState& call, int64_t local) const;
  bool source_here(const CallState& call, int64_t source) const;
  bool choose_push(int64_t bytes, int64_t below, int64_t from, uint64_t epoch, int64_t salt) const;
  std::string read_routing(const DispatchInput& input, CallState& call) const;
  Landing landing(const CallState& call, char* window, int64_t wave, const Run& run, int64_t flag_rows) const;
  // Runs body(expert, first row of `source` for it, run) for what `source` sends to `owner` in a wave of `cap` rows.
  template <class Body>
  void for_each_run(const CallState& call, int64_t source, int64_t owner, int64_t wave, int64_t cap, Body body) const;
  void push_wave(CallState& call, int64_t wave, bool streaming);
  void take_wave(CallState& call, int64_t wave, bool streaming, const Received& out);
  // How this rank gives the rows of a combine.
  struct Giving {
    RowsView y;
    bool in_window;  // y lies in its slot already
    bool push;
    bool streaming;
    int64_t offset;  // of row 0 in the own window, when pulled
    int64_t stride;
    int64_t waves;
  };
  Giving plan_giving(const CallState& call, const CombineInput& input) const;
  char* cell_for(uint64_t epoch, int64_t source) const;
  static constexpr size_t KEPT_STAGE_BYTES = 1 << 20;
  void let_go(CallState& call);
  [[noreturn]] void close_call(CallState& call, FailureKind kind, const std::string& text);
  void refuse_rows(CallState& call, const CombineInput& input);
  void place_own_rows(CallState& call, const RowsView& y, bool keep, bool all_staged);
  void give_wave(const CallState& call, const Giving& plan, int64_t wave);
  bool has_rows_in_wave(const CallState& call, int64_t source, int64_t owner, int64_t wave) const;
  void take_combine_wave(CallState& call, int64_t wave);
  void combine_in_waves(CallState& call, const Giving& plan, std::optional<Failure> broken);
  void await_cells(CallState& call);
  void release_owners(const CallState& call);
  int64_t rows_between(const CallState& call, int64_t source, int64_t owner) const;
  struct Loss {
    FailureKind kind;
    int64_t who;
    std::string text;
    bool gone = false;  // who has left or ended; it may have done its part before
  };
  std::optional<Loss> find_loss(const std::vector<int64_t>& missing, uint64_t epoch, const char* operation,
                                int64_t waited) const;
  [[noreturn]] void lose(const Loss& loss, uint64_t epoch, phase::Phase where);
  // Polls until here(peer) has been true once for each of `peers`; it isn't called again for a peer after that.
  template <class Here>
  void await_peers(const std::vector<int64_t>& peers, uint64_t epoch, const char* operation, phase::Phase where, Here here);
  std::string last_seen(int64_t peer) const;
  void clear_lap(uint64_t epoch);
  CallHeader new_header(uint64_t epoch, kind::Kind kind) const;
  std::string differs(const CallHeader& mine, const CallHeader& theirs, int64_t peer) const;
  void progress(phase::Phase where) { write_progress(layout_, own(), where); }
  char* own() const { return windows_[static_cast<size_t>(rank_)]->address; }
  char* window(int64_t rank) const { return windows_[static_cast<size_t>(rank)]->address; }

  const std::string name_;
  const Layout layout_;
  const int64_t rank_;
  const Tiling tiling_;
  std::vector<std::shared_ptr<Mapping>> windows_;
  std::vector<int> pidfds_;  // -1 where there is none
  const int64_t timeout_ns_, warmup_ns_;
  const int64_t local_begin_, local_end_;
  const RowKernels& kernels_;
  const Flags flags_;
  const int fork_count_;
  const int64_t group_id_;  // marks handles as this group's

  std::mutex call_mutex_;  // guards busy_ and holder_, held for moments only
  std::condition_variable call_ended_;
  bool busy_ = false;
  std::thread::id holder_;
  std::atomic<bool> closing_{false}, closed_{false}, poisoned_{false};
  uint64_t epoch_;                  // a copy of the counter in the window, for those who ask when the windows are gone
  uint64_t heard_;                  // every peer's record was read up to this call
  uint64_t done_;                   // this rank reads nothing of calls up to this one
  std::vector<uint64_t> peers_done_;
  std::atomic<uint64_t> all_done_;  // nor does any peer
  std::string poison_text_;
  std::vector<CallState> calls_;
  std::vector<bool> seen_;  // peers that have come at least once
  mutable std::mutex stage_mutex_;  // guards stages_, expert_order_ and the letting go of windows_
  struct WindowTensor {
    bool held = false;
    uint64_t used_in = 0;
  };
  std::vector<WindowTensor> stages_;

  // Scratch that lives with the group so that a call allocates nothing.
  std::vector<int32_t> matrix_;
  std::vector<int64_t> all_peers_, missing_;
  std::vector<const void*> term_rows_;
  std::vector<double> term_weights_;
  std::vector<char> unlined_;

  Counters counters_{};
  std::vector<int64_t> waited_ns_;
  std::vector<int64_t> expert_rows_;
  std::vector<int32_t> expert_order_;
};

inline std::string quant_name(int32_t quant) {
  switch (static_cast<Quant>(quant)) {
    case Quant::NONE: return "None";
    case Quant::INT8: return "int8";
    case Quant::FP8_E4M3: return "fp8_e4m3";
    default: return "unknown";
  }
}

// Do `rows` rows of `row_bytes`, the first at `offset`, lie in begin..end?
inline bool rows_fit(int64_t offset, int64_t stride, int64_t rows, int64_t row_bytes, int64_t begin, int64_t end) {
  if (rows == 0) return true;
  if (row_bytes < 0 || offset < begin || offset > end) return false;
  if (rows == 1) return offset + row_bytes <= end;  // its stride means nothing
  return stride >= 0 && stride <= end && offset + (rows - 1) * stride + row_bytes <= end;
}

inline std::string rank_list(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

template <class Here>
void Group::await_peers(const std::vector<int64_t>& peers, uint64_t epoch, const char* operation, phase::Phase where,
                        Here here) {
  missing_.assign(peers.begin(), peers.end());
  int64_t start = 0;
  const auto done = [&] {
    for (size_t i = 0; i < missing_.size();) {
      if (!here(missing_[i])) {
        ++i;
        continue;
      }
      const auto peer = static_cast<size_t>(missing_[i]);
      seen_[peer] = true;
      if (start != 0) waited_ns_[peer] += now_ns() - start;
      missing_[i] = missing_.back();
      missing_.pop_back();
    }
    return missing_.empty();
  };
  if (done()) return;
  start = now_ns();
  wait_until(tiling_.wait, done, [&](int64_t waited) {
    at_point("look for losses");
    const auto loss = find_loss(missing_, epoch, operation, waited);
    if (!loss) return;
    // A peer may have done its part and left, or ended, between the poll and the look at it: poll once more. What this process
    // wants (a signal, a close) holds all the same.
    const bool own_wish = loss->kind == FailureKind::INTERRUPTED || loss->kind == FailureKind::GROUP_CLOSED;
    if (!own_wish && done()) return;
    const bool missed = std::find(missing_.begin(), missing_.end(), loss->who) != missing_.end();
    if (loss->gone && !missed && !dropped(Rule::LOST_PEER_IS_MISSING)) return;  // it has; others are late
    lose(*loss, epoch, where);
  });
}

template <class Body>
void Group::for_each_run(const CallState& call, int64_t source, int64_t owner, int64_t wave, int64_t cap, Body body) const {
  const int64_t experts = layout_[NUM_EXPERTS], ranks = layout_[WORLD_SIZE];
  const int64_t end = first_expert(owner + 1, experts, ranks);
  int64_t row = 0;
  for (int64_t e = first_expert(owner, experts, ranks); e < end; ++e) {
    for (int64_t s = 0; s < ranks; ++s) {
      const int64_t count = call.matrix[static_cast<size_t>(s * experts + e)];
      if (s == source && count > 0) {
        const Run run = in_wave(row, count, wave, cap);
        if (run.size() > 0) body(e, row, run);
      }
      row += count;
    }
    row = align_up(row, call.header.align);
  }
}

// The groups of this process by name. Names are short; look-up takes a lock that nobody holds for long.
void add_group(std::shared_ptr<Group> group);
void remove_group(const std::string& name);
std::shared_ptr<Group> find_group(const std::string& name);  // throws GroupClosed

// True when a signal handler of the host program asks to stop; set by the module, called from waits, may take a lock.
extern std::function<bool()> interrupted;

}  // namespace moe_a2a
