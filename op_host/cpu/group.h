// A group of ranks that share windows: the call counter, the handles, who is here and who is lost, and the two operations on
// raw memory. Nothing of torch in here; bindings.cpp turns tensors into what this takes.
#pragma once

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
#include "../../op_kernel/cpu/record.h"
#include "../../op_kernel/cpu/route.h"
#include "../../op_kernel/cpu/rows.h"
#include "../../op_kernel/cpu/wait.h"
#include "failure.h"

namespace moe_a2a {

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
  int64_t streaming_bytes;  // outputs from this size on are written past the cache
};

// What a group counts. Read by EPGroup.stats().
struct Counters {
  int64_t dispatches;
  int64_t combines;
  int64_t dispatch_in_bytes;   // payload copied into the window by dispatch
  int64_t dispatch_out_bytes;  // payload copied into dispatch's output
  int64_t combine_in_bytes;    // payload copied into the window by combine
  int64_t combine_out_bytes;   // payload written to combine's output
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

  // ---- dispatch, in two halves, since the size of the output is known only in the middle
  struct DispatchInput {
    std::string bad;         // why x, topk_idx or topk_weights can't be used; empty when they can
    FailureKind bad_kind = FailureKind::BAD_VALUE;
    RowsView x{};
    int64_t hidden = 0;
    Dtype dtype = Dtype::NONE;
    TopkIdx idx{};
    Weights weights{};       // strides in elements
    int64_t tag = 0;
  };
  struct DispatchPlan {
    uint64_t epoch;
    int64_t rows;          // N
    int64_t handle_words;  // of the handle tensor
  };
  DispatchPlan begin_dispatch(const DispatchInput& input);
  void finish_dispatch(const DispatchInput& input, const DispatchPlan& plan, char* out, char* out_weights, int64_t* handle);

  // ---- combine
  struct CombineInput {
    std::string bad_y, bad_sum;  // bad_sum: y is good and goes out, but this rank can't sum
    FailureKind bad_kind = FailureKind::BAD_VALUE;
    RowsView y{};
    Dtype dtype = Dtype::NONE;
    int64_t hidden = 0;
    const int64_t* handle = nullptr;
    int64_t handle_words = 0;
    Weights weights{};
  };
  // Throws HandleExpired or GroupClosed before anything else. Inside a Call, like everything up to here.
  void check_handle(const int64_t* handle, int64_t words) const;
  void combine(const CombineInput& input, char* out);

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
  const std::vector<int64_t>& waited_ns() const { return waited_ns_; }
  const std::vector<int32_t>& matrix() const { return matrix_; }
  const std::vector<int64_t>& expert_rows() const { return expert_rows_; }

 private:
  struct Handle {
    uint64_t epoch = 0;
    bool open = false;
    int64_t tokens = 0, top_k = 0, rows = 0;
    std::vector<int32_t> matrix;  // C [R, E]: what is decided from it must not hang on a tensor that can be written to
  };

  void enter(const char* operation) const;
  void check_fork(const char* operation) const;
  void leave_windows();
  void publish(uint64_t epoch, const CallHeader& header, const void* payload, int64_t payload_bytes);
  // Waits for the records of `epoch` of all peers. Throws PeerAborted at the first abort unless `drain`.
  void await_records(uint64_t epoch, const char* operation, bool drain);
  template <class Here>
  void await_peers(const std::vector<int64_t>& peers, uint64_t epoch, const char* operation, phase::Phase where, Here here);
  struct Loss {
    FailureKind kind;
    int64_t who;
    std::string text;
  };
  std::optional<Loss> find_loss(const std::vector<int64_t>& missing, uint64_t epoch, const char* operation,
                                int64_t waited) const;
  [[noreturn]] void lose(const Loss& loss, uint64_t epoch, phase::Phase where);
  std::string last_seen(int64_t peer) const;
  void clear_lap(uint64_t epoch);
  CallHeader new_header(uint64_t epoch, kind::Kind kind) const;
  std::string verify_call(uint64_t epoch, const CallHeader& mine) const;
  void progress(uint64_t epoch, phase::Phase where) { write_progress(layout_, own(), epoch, where); }
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
  uint64_t epoch_;                  // n, the number of dispatches started
  std::atomic<uint64_t> drained_;   // every peer's record was seen up to this call
  std::string poison_text_;
  std::vector<Handle> handles_;
  std::vector<bool> seen_;  // peers that have come at least once
  std::mutex stage_mutex_;  // guards stages_ and the letting go of windows_
  struct Stage {
    bool held = false;
    uint64_t used_in = 0;
  };
  std::vector<Stage> stages_;

  // Scratch that lives with the group so that a call allocates nothing.
  std::vector<int32_t> owner_of_, counts_, slot_, expert_, start_, matrix_, base_;
  std::vector<int64_t> all_peers_, missing_, received_;
  std::vector<Source> sources_;
  std::vector<Owner> owners_;
  std::vector<const void*> term_rows_;
  std::vector<double> term_weights_;

  Counters counters_{};
  std::vector<int64_t> waited_ns_;
  std::vector<int64_t> expert_rows_;
};

// The groups of this process by name. Names are short; look-up takes a lock that nobody holds for long.
void add_group(std::shared_ptr<Group> group);
void remove_group(const std::string& name);
std::shared_ptr<Group> find_group(const std::string& name);  // throws GroupClosed

// True when a signal handler of the host program asks to stop; set by the module, called from waits, may take a lock.
extern std::function<bool()> interrupted;

}  // namespace moe_a2a
