#include "group.h"

#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <unordered_map>

namespace moe_a2a {

std::function<bool()> interrupted = [] { return false; };

namespace {

std::atomic<int> forks{0};

const char* phase_name(int32_t where) {
  switch (where) {
    case phase::IDLE: return "idle";
    case phase::DISPATCH_PACK: return "packing in dispatch";
    case phase::DISPATCH_COUNTS: return "waiting for counts in dispatch";
    case phase::DISPATCH_ROWS: return "copying rows in dispatch";
    case phase::COMBINE_WRITE: return "writing rows in combine";
    case phase::COMBINE_WAIT: return "waiting for rows in combine";
    case phase::COMBINE_SUM: return "summing in combine";
    default: return "unknown";
  }
}

std::string rank_list(const std::vector<int64_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

constexpr const char* DISPATCH = "moe_a2a.dispatch";
constexpr const char* COMBINE = "moe_a2a.combine";
constexpr const char* REMEDY = "The group is poisoned: close it and make a new one";

}  // namespace

namespace {

// Do `rows` rows of `row_bytes`, the first at `offset`, lie in begin..end?
bool rows_fit(int64_t offset, int64_t stride, int64_t rows, int64_t row_bytes, int64_t begin, int64_t end) {
  if (rows == 0) return true;
  if (row_bytes < 0 || offset < begin || offset > end) return false;
  if (rows == 1) return offset + row_bytes <= end;  // its stride means nothing
  return stride >= 0 && stride <= end && offset + (rows - 1) * stride + row_bytes <= end;
}

}  // namespace

namespace {
// Held for moments; a fork waits for it, so that the child doesn't inherit it locked.
std::mutex registry_mutex;
std::unordered_map<std::string, std::shared_ptr<Group>>& registry() {
  static auto* groups = new std::unordered_map<std::string, std::shared_ptr<Group>>;
  return *groups;
}
}  // namespace

Mapping::~Mapping() { munmap(address, static_cast<size_t>(bytes)); }

Group::Group(std::string name, const Layout& layout, int64_t rank, const Tiling& tiling,
             std::vector<std::shared_ptr<Mapping>> windows, std::vector<int> pidfds, int64_t timeout_ns, int64_t warmup_ns,
             uint64_t first_epoch)
    : name_(std::move(name)),
      layout_(layout),
      rank_(rank),
      tiling_(tiling),
      windows_(std::move(windows)),
      pidfds_(std::move(pidfds)),
      timeout_ns_(timeout_ns),
      warmup_ns_(warmup_ns),
      local_begin_(first_expert(rank, layout[NUM_EXPERTS], layout[WORLD_SIZE])),
      local_end_(first_expert(rank + 1, layout[NUM_EXPERTS], layout[WORLD_SIZE])),
      kernels_(row_kernels()),
      flags_(layout.portable()),
      fork_count_(forks.load()),
      group_id_(static_cast<int64_t>(std::hash<std::string>{}(name_))),
      epoch_(first_epoch - 1),
      drained_(first_epoch - 1) {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { registry_mutex.lock(); }, [] { registry_mutex.unlock(); },
                   [] {
                     registry_mutex.unlock();
                     forks.fetch_add(1);
                   });
  });
  const auto ranks = static_cast<size_t>(layout[WORLD_SIZE]);
  const auto experts = static_cast<size_t>(layout[NUM_EXPERTS]);
  handles_.resize(static_cast<size_t>(layout[SLOTS]));
  seen_.assign(ranks, false);
  stages_.resize(static_cast<size_t>(layout[STAGE_SLOTS]));
  owner_of_.resize(experts);
  for (size_t r = 0; r < ranks; ++r) {
    const auto end = first_expert(static_cast<int64_t>(r) + 1, layout[NUM_EXPERTS], layout[WORLD_SIZE]);
    for (auto e = first_expert(static_cast<int64_t>(r), layout[NUM_EXPERTS], layout[WORLD_SIZE]); e < end; ++e)
      owner_of_[static_cast<size_t>(e)] = static_cast<int32_t>(r);
    if (static_cast<int64_t>(r) != rank_) all_peers_.push_back(static_cast<int64_t>(r));
  }
  // Peers are visited in a different order by every rank, so that not all of them write to rank 0 first.
  std::rotate(all_peers_.begin(), all_peers_.begin() + std::min<int64_t>(rank_, static_cast<int64_t>(all_peers_.size())),
              all_peers_.end());
  counts_.resize(experts);
  start_.resize(experts);
  base_.resize(experts);
  matrix_.assign(ranks * experts, 0);
  sources_.resize(ranks);
  owners_.resize(ranks);
  waited_ns_.assign(ranks, 0);
  expert_rows_.assign(static_cast<size_t>(local_end_ - local_begin_), 0);
}

Group::~Group() {
  for (int fd : pidfds_)
    if (fd >= 0) ::close(fd);
}

void Group::check_fork(const char* operation) const {
  if (fork_count_ != forks.load(std::memory_order_relaxed))
    throw Failure(FailureKind::GROUP_CLOSED,
                  say("%s: group %s was made before this process forked and belongs to the parent; make an EPGroup in the "
                      "child",
                      operation, name_.c_str()));
}

void Group::enter(const char* operation) const {
  check_fork(operation);
  if (closed_ || closing_)
    throw Failure(FailureKind::GROUP_CLOSED,
                  say("%s: group %s on rank %ld is closed; make a new EPGroup", operation, name_.c_str(), rank_));
  if (poisoned_)
    throw Failure(FailureKind::GROUP_POISONED, say("%s: group %s on rank %ld takes no further calls after: %s", operation,
                                                   name_.c_str(), rank_, poison_text_.c_str()));
}

Group::Call::Call(Group& group, const char* operation) : group_(group) {
  // First of all: in a forked child the thread that would end the call doesn't exist.
  group.check_fork(operation);
  std::unique_lock lock(group.call_mutex_);
  if (group.busy_ && group.holder_ == std::this_thread::get_id())
    throw Failure(FailureKind::GROUP_BUSY,
                  say("%s: group %s on rank %ld is in the middle of a call of this very thread (a signal handler or a finaliser "
                      "called it); only close() and stats() can be used there",
                      operation, group.name_.c_str(), group.rank_));
  while (group.busy_) {
    group.call_ended_.wait_for(lock, std::chrono::milliseconds(50));
    if (!group.busy_) break;
    lock.unlock();  // a handler may want the lock
    if (interrupted())
      throw Failure(FailureKind::INTERRUPTED, say("%s: interrupted by a signal while another thread's call on group %s was under "
                                                  "way; nothing was sent",
                                                  operation, group.name_.c_str()));
    lock.lock();
  }
  group.busy_ = true;
  group.holder_ = std::this_thread::get_id();
}

Group::Call::~Call() {
  // close() that came meanwhile couldn't let go of the windows under this call.
  if (group_.closing_ && !group_.closed_) group_.leave_windows();
  {
    std::lock_guard lock(group_.call_mutex_);
    group_.busy_ = false;
  }
  group_.call_ended_.notify_all();
}

// ---------------------------------------------------------------------------------------------------------- waiting

std::string Group::last_seen(int64_t peer) const {
  const ProgressRead read = read_progress(layout_, window(peer));
  if (read.epoch == 0 && read.phase == phase::IDLE) return say("rank %ld has made no call yet", peer);
  return say("rank %ld was last seen in call %lu, %s", peer, read.epoch, phase_name(read.phase));
}

void Group::lose(const Loss& loss, uint64_t epoch, phase::Phase where) {
  if (loss.kind == FailureKind::GROUP_CLOSED) throw Failure(loss.kind, loss.text);  // peers will read LEFT
  for (int64_t peer : all_peers_)
    write_status(layout_, window(peer), rank_, status::POISON, static_cast<int32_t>(loss.kind), loss.who, epoch, where);
  {
    std::lock_guard guard(stage_mutex_);  // group.empty reads it from other threads
    poison_text_ = loss.text;
    poisoned_ = true;
  }
  throw Failure(loss.kind, loss.text);
}

std::optional<Group::Loss> Group::find_loss(const std::vector<int64_t>& missing, uint64_t epoch, const char* operation,
                                            int64_t waited) const {
  if (interrupted())
    return Loss{FailureKind::INTERRUPTED, rank_,
                say("%s, call %lu on rank %ld: interrupted by a signal while waiting for %s. %s", operation, epoch, rank_,
                    rank_list(missing).c_str(), REMEDY)};
  if (closing_)
    return Loss{FailureKind::GROUP_CLOSED, rank_,
                say("%s, call %lu on rank %ld: the group was closed (by another thread or a signal handler) while this call waited "
                    "for %s",
                    operation, epoch, rank_, rank_list(missing).c_str())};
  // First who is gone, then who gave up: the second is often only a consequence of the first.
  for (int64_t peer : missing) {
    const StatusRead read = read_status(layout_, own(), peer);
    if (read.state == status::LEFT)
      return Loss{FailureKind::PEER_LOST, peer,
                  say("%s, call %lu on rank %ld: rank %ld closed its group after call %lu. %s", operation, epoch, rank_, peer,
                      read.epoch, REMEDY)};
    const int pidfd = pidfds_[static_cast<size_t>(peer)];
    if (pidfd >= 0) {
      pollfd ended{pidfd, POLLIN, 0};
      if (::poll(&ended, 1, 0) > 0)
        return Loss{FailureKind::PEER_LOST, peer,
                    say("%s, call %lu on rank %ld: the process of rank %ld has ended (%s). %s", operation, epoch, rank_, peer,
                        last_seen(peer).c_str(), REMEDY)};
    }
  }
  for (int64_t peer : all_peers_) {
    const StatusRead read = read_status(layout_, own(), peer);
    if (read.state == status::POISON)
      return Loss{FailureKind::PEER_LOST, peer,
                  say("%s, call %lu on rank %ld: rank %ld gave the group up in call %lu (%s%s). %s", operation, epoch, rank_,
                      peer, read.epoch, phase_name(read.phase),
                      read.who >= 0 && read.who != peer ? say(", it missed rank %ld", read.who).c_str() : "", REMEDY)};
  }
  const bool warming = std::any_of(missing.begin(), missing.end(),
                                   [this](int64_t peer) { return !seen_[static_cast<size_t>(peer)]; });
  const int64_t limit = warming ? std::max(warmup_ns_, timeout_ns_) : timeout_ns_;
  if (waited < limit) return std::nullopt;
  std::string where_they_are;
  for (int64_t peer : missing) where_they_are += (where_they_are.empty() ? "" : "; ") + last_seen(peer);
  return Loss{FailureKind::PEER_TIMEOUT, missing.front(),
              say("%s, call %lu on rank %ld: nothing from %s for %.3g s%s (%s). All ranks must make the same calls in the same "
                  "order. %s",
                  operation, epoch, rank_, rank_list(missing).c_str(), static_cast<double>(waited) * 1e-9,
                  warming ? " (warmup_timeout)" : "", where_they_are.c_str(), REMEDY)};
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
    const auto loss = find_loss(missing_, epoch, operation, waited);
    if (!loss) return;
    // A peer may have done its part and left, or ended, between the poll and the look at it: poll once more. What this process
    // wants (a signal, a close) holds all the same.
    const bool own_wish = loss->kind == FailureKind::INTERRUPTED || loss->kind == FailureKind::GROUP_CLOSED;
    if (own_wish || !done()) lose(*loss, epoch, where);
  });
}

void Group::await_records(uint64_t epoch, const char* operation, bool drain) {
  await_peers(all_peers_, epoch, operation, phase::DISPATCH_COUNTS, [&](int64_t peer) {
    if (!record_here(layout_, own(), peer, epoch)) return false;
    if (!drain && read_record(layout_, own(), peer, epoch).kind == kind::ABORT)
      throw Failure(FailureKind::PEER_ABORTED,
                    say("%s, call %lu on rank %ld: rank %ld aborted the call: %s. Nothing was exchanged; the group stays "
                        "usable",
                        operation, epoch, rank_, peer, record_text(layout_, own(), peer, epoch).c_str()));
    return true;
  });
  drained_ = epoch;
}

void Group::publish(uint64_t epoch, const CallHeader& header, const void* payload, int64_t payload_bytes) {
  for (int64_t peer : all_peers_) write_record(layout_, window(peer), rank_, epoch, header, payload, payload_bytes);
}

// --------------------------------------------------------------------------------------------------------- dispatch

void Group::clear_lap(uint64_t epoch) {
  // On the first use of a slot in a new lap the codes of the lap before would match again, so they are cleared before the record
  // is published. At the second use once more: where a combine ended early on this rank, a peer may have written its cell of the
  // slot's last use in the old lap after the first clearing; now that its record of the first use is here, it has.
  const uint64_t two_uses = 2 * static_cast<uint64_t>(layout_[SLOTS]);
  const uint64_t before = epoch > two_uses ? layout_.lap(epoch - two_uses) : 0;
  if (layout_.lap(epoch) == before) return;
  for (int64_t owner = 0; owner < layout_[WORLD_SIZE]; ++owner)
    flags_.clear(own() + layout_.cell_at(epoch, owner) + layout_[CELL_CODE]);
}

std::string Group::verify_call(uint64_t epoch, const CallHeader& mine) const {
  for (int64_t peer = 0; peer < layout_[WORLD_SIZE]; ++peer) {
    if (peer == rank_) continue;
    const CallHeader theirs = read_record(layout_, own(), peer, epoch);
    const auto differs = [&](const char* what, const std::string& a, const std::string& b) {
      return say("%s is %s on rank %ld and %s on rank %ld", what, a.c_str(), rank_, b.c_str(), peer);
    };
    if (theirs.generation != mine.generation)
      return differs("the generation of the windows", std::to_string(mine.generation), std::to_string(theirs.generation));
    if (theirs.epoch != epoch) return differs("the call number", std::to_string(epoch), std::to_string(theirs.epoch));
    if (theirs.kind != mine.kind) return differs("the kind of call", std::to_string(mine.kind), std::to_string(theirs.kind));
    if (theirs.tag != mine.tag)
      return differs("tag (which layer is calling)", std::to_string(mine.tag), std::to_string(theirs.tag));
    if (theirs.hidden != mine.hidden)
      return differs("x's hidden size H", std::to_string(mine.hidden), std::to_string(theirs.hidden));
    if (theirs.dtype != mine.dtype)
      return differs("x's dtype", dtype_name(static_cast<Dtype>(mine.dtype)), dtype_name(static_cast<Dtype>(theirs.dtype)));
    if (theirs.weight_dtype != mine.weight_dtype)
      return differs("topk_weights' dtype (none: not given)", dtype_name(static_cast<Dtype>(mine.weight_dtype)),
                     dtype_name(static_cast<Dtype>(theirs.weight_dtype)));
    if (theirs.mode != mine.mode || theirs.quant != mine.quant || theirs.pad_to != mine.pad_to || theirs.align != mine.align)
      return say("rank %ld's record asks for mode %d, quantisation %d, pad_to %ld, align %d, which rank %ld doesn't know", peer,
                 theirs.mode, theirs.quant, theirs.pad_to, theirs.align, rank_);
    // Addresses from another process are checked before they are used: a rank must not crash because another one is wrong.
    const int64_t row_bytes = theirs.hidden * itemsize(static_cast<Dtype>(theirs.dtype));
    if (theirs.tokens < 0 || theirs.tokens > layout_[MAX_TOKENS] || theirs.top_k < 0 || theirs.top_k > layout_[TOP_K] ||
        !rows_fit(theirs.x_offset, theirs.x_stride, theirs.tokens, row_bytes, layout_[X], layout_[Y]))
      return say("rank %ld's record places x [%ld, %ld] at byte %ld with %ld bytes from row to row, which isn't inside its x region",
                 peer, theirs.tokens, theirs.hidden, theirs.x_offset, theirs.x_stride);
  }
  return {};
}

CallHeader Group::new_header(uint64_t epoch, kind::Kind kind) const {
  CallHeader header{};
  header.kind = kind;
  header.generation = static_cast<int32_t>(layout_[GENERATION]);
  header.epoch = epoch;
  header.pad_to = -1;
  header.align = 1;
  return header;
}

Group::DispatchPlan Group::begin_dispatch(const DispatchInput& input) {
  enter(DISPATCH);
  // A call that ended early left records of its peers unread; they must be here before this one may overwrite anything.
  if (drained_ < epoch_) await_records(epoch_, DISPATCH, true);

  std::string bad = input.bad;
  FailureKind bad_kind = input.bad_kind;
  const auto pairs_here = static_cast<size_t>(input.idx.tokens * input.idx.top_k);
  if (bad.empty() && slot_.size() < pairs_here) {
    try {
      slot_.resize(pairs_here);
      expert_.resize(pairs_here);
    } catch (const std::bad_alloc&) {
      slot_.clear();
      bad = say("%s: no memory on rank %ld to sort %zu pairs", DISPATCH, rank_, pairs_here);
      bad_kind = FailureKind::OUT_OF_MEMORY;
    }
  }

  const uint64_t epoch = ++epoch_;
  const int64_t ranks = layout_[WORLD_SIZE], experts = layout_[NUM_EXPERTS];
  Handle& handle = handles_[static_cast<size_t>(layout_.slot(epoch))];
  handle.epoch = 0;
  handle.open = false;
  progress(epoch, phase::DISPATCH_PACK);

  if (bad.empty()) {
    const BadId id = send_counts(input.idx, experts, counts_.data(), slot_.data(), expert_.data());
    if (id.found)
      bad = say("%s: topk_idx[%ld, %ld] = %ld is outside -1..%ld on rank %ld (num_experts = %ld); ids must be global expert "
                "ids, or -1 for no expert",
                DISPATCH, id.token, id.k, id.value, experts - 1, rank_, experts);
    if (id.found) bad_kind = FailureKind::BAD_VALUE;
  }
  clear_lap(epoch);
  if (!bad.empty()) {
    CallHeader header = new_header(epoch, kind::ABORT);
    header.reason = static_cast<int32_t>(bad_kind);
    const std::string text = clip_text(bad, layout_[RECORD_PAYLOAD_BYTES]);
    publish(epoch, header, text.data(), static_cast<int64_t>(text.size()));
    progress(epoch, phase::IDLE);
    throw Failure(bad_kind, bad);
  }

  // x that lies in the window already is read where it is.
  const char* stage_begin = own() + layout_.x_at(layout_[SLOTS]);
  const char* stage_end = stage_begin + layout_[STAGE_SLOTS] * layout_[X_SLOT_STRIDE];
  // Only where the peers will find it so, too: a view that leaves its region, or whose rows are further apart than the record's
  // 32 bits can say, is copied like any other tensor.
  const bool staged = input.x.rows > 0 && input.x.data >= stage_begin && input.x.data < stage_end &&
                      (input.x.rows == 1 || input.x.stride <= std::numeric_limits<int32_t>::max()) &&
                      rows_fit(input.x.data - own(), input.x.stride, input.x.rows, input.x.row_bytes, layout_[X], layout_[Y]);
  char* list = own() + layout_.list_at(epoch);
  char* weight_list = own() + layout_.weight_at(epoch);
  const int64_t weight_bytes = itemsize(input.weights.dtype);
  pack_lists(expert_.data(), slot_.data(), counts_.data(), input.idx.tokens, input.idx.top_k, experts, start_.data(),
             reinterpret_cast<int32_t*>(list), static_cast<const char*>(input.weights.data), weight_bytes,
             input.weights.token_stride * weight_bytes, input.weights.k_stride * weight_bytes, weight_list);
  CallHeader header = new_header(epoch, kind::COUNTS);
  header.tokens = input.idx.tokens;
  header.hidden = input.hidden;
  header.dtype = static_cast<int32_t>(input.dtype);
  header.weight_dtype = static_cast<int32_t>(input.weights.dtype);
  header.top_k = input.idx.top_k;
  header.tag = input.tag;
  if (staged) {
    header.x_offset = input.x.data - own();
    header.x_stride = input.x.rows == 1 ? layout_.row_stride(input.x.row_bytes) : input.x.stride;
    std::lock_guard guard(stage_mutex_);
    stages_[static_cast<size_t>((input.x.data - stage_begin) / layout_[X_SLOT_STRIDE])].used_in = epoch;
  } else {
    header.x_offset = layout_.x_at(layout_.slot(epoch));
    header.x_stride = layout_.row_stride(input.x.row_bytes);
    counters_.dispatch_in_bytes += pack_rows(kernels_, input.x, expert_.data(), input.idx.top_k, local_begin_, local_end_,
                                             own() + header.x_offset, header.x_stride);
  }
  publish(epoch, header, counts_.data(), experts * 4);

  progress(epoch, phase::DISPATCH_COUNTS);
  try {
    await_records(epoch, DISPATCH, false);
  } catch (const Failure&) {
    progress(epoch, phase::IDLE);
    throw;
  }
  // Every rank sees the same records, so what follows is decided alike everywhere.
  const std::string mismatch = verify_call(epoch, header);
  if (!mismatch.empty()) {
    progress(epoch, phase::IDLE);
    throw Failure(FailureKind::CALL_MISMATCH,
                  say("%s, call %lu on rank %ld: the ranks' calls don't go together: %s. Nothing was exchanged; the group "
                      "stays usable",
                      DISPATCH, epoch, rank_, mismatch.c_str()));
  }
  for (int64_t s = 0; s < ranks; ++s) {
    const int32_t* counts = s == rank_ ? counts_.data() : record_counts(layout_, own(), s, epoch);
    std::memcpy(matrix_.data() + s * experts, counts, static_cast<size_t>(experts) * 4);
  }
  int64_t rows = 0;
  for (int64_t owner = 0; owner < ranks; ++owner) {
    int64_t total = 0;
    const int64_t end = first_expert(owner + 1, experts, ranks);
    for (int64_t e = first_expert(owner, experts, ranks); e < end; ++e)
      for (int64_t s = 0; s < ranks; ++s) total += matrix_[static_cast<size_t>(s * experts + e)];
    if (total > layout_[RECV_ROWS]) {
      progress(epoch, phase::IDLE);
      throw Failure(FailureKind::WINDOW_TOO_SMALL,
                    say("%s, call %lu on rank %ld: rank %ld would receive %ld rows, the group's windows hold max_recv_rows = "
                        "%ld. Nothing was exchanged; the group stays usable. Make the group with a larger max_recv_rows, or "
                        "dispatch fewer tokens at once",
                        DISPATCH, epoch, rank_, owner, total, layout_[RECV_ROWS]));
    }
    if (owner == rank_) rows = total;
  }
  progress(epoch, phase::DISPATCH_ROWS);
  const int64_t pairs = input.idx.tokens * input.idx.top_k, local = local_end_ - local_begin_;
  return {epoch, rows, HandleWords(pairs, ranks, experts, local).total};
}

void Group::finish_dispatch(const DispatchInput& input, const DispatchPlan& plan, char* out, char* out_weights,
                            int64_t* handle) {
  namespace w = handle_word;
  const int64_t ranks = layout_[WORLD_SIZE], experts = layout_[NUM_EXPERTS], local = local_end_ - local_begin_;
  const int64_t weight_bytes = itemsize(input.weights.dtype);
  for (int64_t s = 0; s < ranks; ++s) {
    Source& source = sources_[static_cast<size_t>(s)];
    const char* base = window(s);
    source.list = reinterpret_cast<const int32_t*>(base + layout_.list_at(plan.epoch));
    source.weight_list = base + layout_.weight_at(plan.epoch);
    if (s == rank_) {
      source.x = input.x.data;  // own rows come from x itself
      source.stride = input.x.stride;
    } else {
      const CallHeader header = read_record(layout_, own(), s, plan.epoch);
      source.x = base + header.x_offset;
      source.stride = header.x_stride;
    }
  }
  const bool streaming = plan.rows * input.x.row_bytes >= tiling_.streaming_bytes;
  counters_.dispatch_out_bytes +=
      gather_rows(kernels_, matrix_.data(), ranks, experts, local_begin_, local_end_, sources_.data(), input.x.row_bytes,
                  streaming, out, weight_bytes, out_weights);

  row_bases(matrix_.data(), ranks, experts, rank_, base_.data());
  const int64_t pairs = input.idx.tokens * input.idx.top_k;
  const HandleWords words(pairs, ranks, experts, local);
  handle[w::MAGIC] = HANDLE_MAGIC;
  handle[w::EPOCH] = static_cast<int64_t>(plan.epoch);
  handle[w::GENERATION] = layout_[GENERATION];
  handle[w::TOKENS] = input.idx.tokens;
  handle[w::TOP_K] = input.idx.top_k;
  handle[w::HIDDEN] = input.hidden;
  handle[w::ROWS] = plan.rows;
  handle[w::WORLD_SIZE] = ranks;
  handle[w::NUM_EXPERTS] = experts;
  handle[w::RANK] = rank_;
  handle[w::DTYPE] = static_cast<int64_t>(input.dtype);
  handle[w::GROUP] = group_id_;
  for (int word = w::GROUP + 1; word < HANDLE_HEADER_WORDS; ++word) handle[word] = 0;
  handle[w::COUNTS] = words.counts;
  handle[w::OFFSETS] = words.offsets;
  handle[w::MATRIX] = words.matrix;
  handle[w::EXPERT] = words.expert;
  handle[w::ROW] = words.row;
  if (plan.handle_words > handle[w::ROW]) handle[plan.handle_words - 1] = 0;  // a last int32 without a partner
  auto* offsets = reinterpret_cast<int32_t*>(handle + handle[w::OFFSETS]);
  offsets[0] = 0;
  if (local % 2 == 0) offsets[local + 1] = 0;
  for (int64_t e = 0; e < local; ++e) {
    int64_t rows = 0;
    for (int64_t s = 0; s < ranks; ++s) rows += matrix_[static_cast<size_t>(s * experts + local_begin_ + e)];
    handle[handle[w::COUNTS] + e] = rows;
    offsets[e + 1] = offsets[e] + static_cast<int32_t>(rows);
    expert_rows_[static_cast<size_t>(e)] += rows;
  }
  auto* matrix = reinterpret_cast<int32_t*>(handle + handle[w::MATRIX]);
  if (ranks * experts % 2 != 0) matrix[ranks * experts] = 0;
  std::memcpy(matrix, matrix_.data(), static_cast<size_t>(ranks * experts) * 4);
  auto* expert = reinterpret_cast<int32_t*>(handle + handle[w::EXPERT]);
  auto* row = reinterpret_cast<int32_t*>(handle + handle[w::ROW]);
  if (pairs % 2 != 0) expert[pairs] = 0;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int32_t e = expert_[static_cast<size_t>(pair)];
    expert[pair] = e;
    row[pair] = e < 0 ? -1 : base_[static_cast<size_t>(e)] + slot_[static_cast<size_t>(pair)];
  }

  Handle& kept_handle = handles_[static_cast<size_t>(layout_.slot(plan.epoch))];
  kept_handle.epoch = plan.epoch;
  kept_handle.open = true;
  kept_handle.tokens = input.idx.tokens;
  kept_handle.top_k = input.idx.top_k;
  kept_handle.rows = plan.rows;
  kept_handle.matrix = matrix_;  // same size each time: no allocation after the first
  ++counters_.dispatches;
  int64_t kept = 0, stays = 0;
  for (int64_t e = 0; e < experts; ++e) {
    kept += counts_[static_cast<size_t>(e)];
    if (e >= local_begin_ && e < local_end_) stays += counts_[static_cast<size_t>(e)];
  }
  counters_.sent_rows += kept - stays;
  counters_.received_rows += plan.rows - stays;
  progress(plan.epoch, phase::IDLE);
}

void Group::abort_call(FailureKind kind, const std::string& text) {
  enter(DISPATCH);
  DispatchInput input;
  input.bad = text;
  input.bad_kind = kind;
  try {
    begin_dispatch(input);
  } catch (const Failure& failure) {
    if (failure.kind != kind) throw;
  }
}

// ---------------------------------------------------------------------------------------------------------- combine

void Group::check_handle(const int64_t* handle, int64_t words) const {
  namespace w = handle_word;
  enter(COMBINE);
  if (words < HANDLE_HEADER_WORDS || handle[w::MAGIC] != HANDLE_MAGIC)
    throw Failure(FailureKind::BAD_VALUE,
                  say("%s: handle on rank %ld isn't one that moe_a2a.dispatch returned", COMBINE, rank_));
  if (handle[w::GENERATION] != layout_[GENERATION] || handle[w::WORLD_SIZE] != layout_[WORLD_SIZE] ||
      handle[w::NUM_EXPERTS] != layout_[NUM_EXPERTS] || handle[w::RANK] != rank_ || handle[w::GROUP] != group_id_)
    throw Failure(FailureKind::BAD_VALUE, say("%s: handle on rank %ld belongs to another group than %s", COMBINE, rank_,
                                              name_.c_str()));
  // It is a tensor, and tensors can be written to: nothing in it may lead outside of it.
  const int64_t tokens = handle[w::TOKENS], top_k = handle[w::TOP_K], rows = handle[w::ROWS];
  const bool sane = tokens >= 0 && tokens <= layout_[MAX_TOKENS] && top_k >= 0 && top_k <= layout_[TOP_K] && rows >= 0 &&
                    rows <= layout_[RECV_ROWS];
  const HandleWords where(sane ? tokens * top_k : 0, layout_[WORLD_SIZE], layout_[NUM_EXPERTS], local_end_ - local_begin_);
  if (!sane || handle[w::MATRIX] != where.matrix || handle[w::EXPERT] != where.expert || handle[w::ROW] != where.row ||
      words != where.total)
    throw Failure(FailureKind::BAD_VALUE, say("%s: the handle on rank %ld was written to after dispatch returned it", COMBINE,
                                              rank_));
  const auto epoch = static_cast<uint64_t>(handle[w::EPOCH]);
  const Handle& state = handles_[static_cast<size_t>(layout_.slot(epoch))];
  if (state.epoch != epoch || epoch > epoch_ || epoch_ - epoch >= static_cast<uint64_t>(layout_[SLOTS]))
    throw Failure(FailureKind::HANDLE_EXPIRED,
                  say("%s: the handle of call %lu on rank %ld has expired: %lu newer dispatches have started and the group's "
                      "depth is %ld. Combine earlier or make the group with a larger depth",
                      COMBINE, epoch, rank_, epoch_ - epoch, layout_[SLOTS]));
  if (tokens != state.tokens || top_k != state.top_k || rows != state.rows)
    throw Failure(FailureKind::BAD_VALUE, say("%s: the handle on rank %ld was written to after dispatch returned it", COMBINE,
                                              rank_));
  if (!state.open)
    throw Failure(FailureKind::HANDLE_EXPIRED,
                  say("%s: the handle of call %lu on rank %ld was combined already; a handle is good for one combine", COMBINE,
                      epoch, rank_));
}

void Group::combine(const CombineInput& input, char* out) {
  namespace hw = handle_word;
  const int64_t* handle = input.handle;
  const auto epoch = static_cast<uint64_t>(handle[hw::EPOCH]);
  const int64_t ranks = layout_[WORLD_SIZE], experts = layout_[NUM_EXPERTS];
  Handle& state = handles_[static_cast<size_t>(layout_.slot(epoch))];
  const int32_t* matrix = state.matrix.data();
  state.open = false;  // whatever happens from here on
  progress(epoch, phase::COMBINE_WRITE);

  const auto rows_from = [&](int64_t source, int64_t owner) {
    int64_t rows = 0;
    const int64_t end = first_expert(owner + 1, experts, ranks);
    for (int64_t e = first_expert(owner, experts, ranks); e < end; ++e) rows += matrix[source * experts + e];
    return rows;
  };

  // Which row each pair of this rank has: from the tensor, so every one is checked against what its owner received.
  const int64_t tokens = state.tokens, top_k = state.top_k;
  const auto* expert = reinterpret_cast<const int32_t*>(handle + handle[hw::EXPERT]);
  const auto* row = reinterpret_cast<const int32_t*>(handle + handle[hw::ROW]);
  received_.resize(static_cast<size_t>(ranks));
  for (int64_t owner = 0; owner < ranks; ++owner) {
    int64_t total = 0;
    for (int64_t source = 0; source < ranks; ++source) total += rows_from(source, owner);
    received_[static_cast<size_t>(owner)] = rows_from(rank_, owner) > 0 ? total : 0;
  }
  std::string bad_sum = input.bad_sum;
  FailureKind bad_sum_kind = input.bad_kind;
  for (int64_t pair = 0; pair < tokens * top_k; ++pair) {
    if (expert[pair] < 0) continue;
    if (expert[pair] < experts && row[pair] >= 0 &&
        row[pair] < received_[static_cast<size_t>(owner_of_[static_cast<size_t>(expert[pair])])])
      continue;
    bad_sum = say("%s: the handle of call %lu on rank %ld was written to after dispatch returned it", COMBINE, epoch, rank_);
    bad_sum_kind = FailureKind::BAD_VALUE;
    break;
  }

  // The owner's half: rows into the window, then the code, only to sources that have rows here.
  const char* slot_begin = own() + layout_.y_at(epoch);
  const bool in_window = input.y.rows > 0 && input.y.data >= slot_begin &&
                         input.y.data < slot_begin + layout_[Y_SLOT_STRIDE] &&
                         (input.y.rows == 1 || input.y.stride <= std::numeric_limits<int32_t>::max()) &&
                         rows_fit(input.y.data - own(), input.y.stride, input.y.rows, input.y.row_bytes, layout_[Y],
                                  layout_[TOTAL_BYTES]);
  const int64_t stride = in_window ? (input.y.rows == 1 ? layout_.row_stride(input.y.row_bytes) : input.y.stride) : layout_.row_stride(input.y.row_bytes);
  const int64_t offset = in_window ? input.y.data - own() : layout_.y_at(epoch);
  for (int64_t source : all_peers_) {
    if (rows_from(source, rank_) == 0) continue;
    char* cell = window(source) + layout_.cell_at(epoch, rank_);
    int32_t body[CELL_BODY_WORDS] = {};
    if (!input.bad_y.empty()) {
      const std::string text = clip_text(input.bad_y, layout_[CELL_TEXT_BYTES]);
      body[cell_word::REASON] = static_cast<int32_t>(input.bad_kind);
      body[cell_word::TEXT_BYTES] = static_cast<int32_t>(text.size());
      std::memcpy(cell + layout_[CELL_BODY], body, sizeof body);
      std::memcpy(cell + layout_[CELL_TEXT], text.data(), text.size());
      flags_.store_refusal(cell + layout_[CELL_CODE], layout_.code(epoch));
      continue;
    }
    if (!in_window)
      counters_.combine_in_bytes += write_rows(kernels_, input.y, matrix, ranks, experts, local_begin_, local_end_, source,
                                               own() + offset, stride);
    body[cell_word::DTYPE] = static_cast<int32_t>(input.dtype);
    body[cell_word::HIDDEN] = static_cast<int32_t>(input.hidden);
    body[cell_word::STRIDE] = static_cast<int32_t>(stride);
    put64(body, cell_word::Y_LO, offset);
    std::memcpy(cell + layout_[CELL_BODY], body, sizeof body);
    flags_.store(cell + layout_[CELL_CODE], layout_.code(epoch));
  }
  if (!input.bad_y.empty()) {
    progress(epoch, phase::IDLE);
    throw Failure(input.bad_kind, input.bad_y);
  }
  if (!bad_sum.empty()) {
    progress(epoch, phase::IDLE);
    throw Failure(bad_sum_kind, bad_sum);
  }

  // The source's half: wait only for owners that hold rows of this rank, then sum.
  progress(epoch, phase::COMBINE_WAIT);
  std::vector<int64_t> holders;
  for (int64_t owner : all_peers_)
    if (rows_from(rank_, owner) > 0) holders.push_back(owner);
  int64_t refused = -1;
  await_peers(holders, epoch, COMBINE, phase::COMBINE_WAIT, [&](int64_t owner) {
    const char* code = own() + layout_.cell_at(epoch, owner) + layout_[CELL_CODE];
    if (flags_.holds(code, layout_.code(epoch))) return true;
    if (!flags_.holds_refusal(code, layout_.code(epoch))) return false;
    refused = owner;
    return true;
  });
  progress(epoch, phase::COMBINE_SUM);
  if (refused >= 0) {
    const char* cell = own() + layout_.cell_at(epoch, refused);
    const auto* body = reinterpret_cast<const int32_t*>(cell + layout_[CELL_BODY]);
    const auto bytes = std::clamp<int64_t>(body[cell_word::TEXT_BYTES], 0, layout_[CELL_TEXT_BYTES]);
    progress(epoch, phase::IDLE);
    throw Failure(FailureKind::PEER_ABORTED,
                  say("%s, call %lu on rank %ld: rank %ld has no rows to give: %s. The handle is closed; the group stays usable",
                      COMBINE, epoch, rank_, refused, readable_text(cell + layout_[CELL_TEXT], bytes).c_str()));
  }
  for (int64_t owner : holders) {
    const auto* body = reinterpret_cast<const int32_t*>(own() + layout_.cell_at(epoch, owner) + layout_[CELL_BODY]);
    if (body[cell_word::DTYPE] != static_cast<int32_t>(input.dtype) || body[cell_word::HIDDEN] != input.hidden) {
      progress(epoch, phase::IDLE);
      throw Failure(FailureKind::CALL_MISMATCH,
                    say("%s, call %lu on rank %ld: y is %s with H = %ld here and %s with H = %d on rank %ld. The handle is "
                        "closed; the group stays usable",
                        COMBINE, epoch, rank_, dtype_name(input.dtype), input.hidden,
                        dtype_name(static_cast<Dtype>(body[cell_word::DTYPE])), body[cell_word::HIDDEN], owner));
    }
    const int64_t y_offset = get64(body, cell_word::Y_LO), y_stride = body[cell_word::STRIDE];
    int64_t y_rows = 0;
    for (int64_t source = 0; source < ranks; ++source) y_rows += rows_from(source, owner);
    if (!rows_fit(y_offset, y_stride, y_rows, input.hidden * itemsize(input.dtype), layout_[Y], layout_[TOTAL_BYTES])) {
      progress(epoch, phase::IDLE);
      throw Failure(FailureKind::CALL_MISMATCH,
                    say("%s, call %lu on rank %ld: rank %ld's cell places y [%ld, %ld] at byte %ld with %ld bytes from row to row, "
                        "which isn't inside its y region. The handle is closed; the group stays usable",
                        COMBINE, epoch, rank_, owner, y_rows, input.hidden, y_offset, y_stride));
    }
    owners_[static_cast<size_t>(owner)] = {window(owner) + y_offset, y_stride};
  }
  owners_[static_cast<size_t>(rank_)] = {input.y.data, input.y.stride};
  if (term_rows_.size() < static_cast<size_t>(top_k)) {
    term_rows_.resize(static_cast<size_t>(top_k));
    term_weights_.resize(static_cast<size_t>(top_k));
  }
  sum_tokens(kernels_, input.dtype, tokens, top_k, input.hidden,
             expert, row, owner_of_.data(), owners_.data(), input.weights,
             term_rows_.data(), term_weights_.data(), out);
  counters_.combine_out_bytes += tokens * input.hidden * itemsize(input.dtype);
  ++counters_.combines;
  progress(epoch, phase::IDLE);
}

// -------------------------------------------------------------------------------------------------- tensors in the window

char* Group::take_stage(int64_t tokens, int64_t row_bytes, int64_t* slot, std::shared_ptr<Mapping>* window) {
  check_fork("moe_a2a.EPGroup.empty");
  std::lock_guard guard(stage_mutex_);
  enter("moe_a2a.EPGroup.empty");
  if (tokens < 0 || tokens > layout_[MAX_TOKENS] || row_bytes > layout_[ROW_BYTES])
    throw Failure(FailureKind::BAD_VALUE,
                  say("moe_a2a.EPGroup.empty: %ld rows of %ld bytes on rank %ld don't fit the group's max_tokens = %ld rows of "
                      "%ld bytes",
                      tokens, row_bytes, rank_, layout_[MAX_TOKENS], layout_[ROW_BYTES]));
  int64_t held = 0, read = 0;
  for (size_t i = 0; i < stages_.size(); ++i) {
    // Peers may read x of call n until their record n + 1 is here.
    const bool being_read = stages_[i].used_in != 0 && drained_ < stages_[i].used_in + 1;
    if (!stages_[i].held && !being_read) {
      stages_[i] = {true, 0};
      *slot = static_cast<int64_t>(i);
      *window = windows_[static_cast<size_t>(rank_)];
      return own() + layout_.x_at(layout_[SLOTS] + *slot);
    }
    stages_[i].held ? ++held : ++read;
  }
  throw Failure(FailureKind::WINDOW_BUSY,
                say("moe_a2a.EPGroup.empty: all %ld window tensors of rank %ld are in use: %ld are still referenced, %ld were "
                    "dispatched and peers may read them until the next dispatch has returned. Drop a tensor, dispatch, or "
                    "make the group with a larger depth",
                    static_cast<int64_t>(stages_.size()), rank_, held, read));
}

void Group::release_stage(int64_t slot) {
  if (fork_count_ != forks.load(std::memory_order_relaxed)) return;  // the lock may be held by a thread that isn't here
  std::lock_guard guard(stage_mutex_);
  stages_[static_cast<size_t>(slot)].held = false;
}

char* Group::rows_at(const int64_t* handle, int64_t words, int64_t row_bytes, std::shared_ptr<Mapping>* window) {
  const Call call(*this, "moe_a2a.Dispatched.empty_like_rows");
  check_handle(handle, words);
  if (row_bytes > layout_[ROW_BYTES])
    throw Failure(FailureKind::BAD_VALUE,
                  say("moe_a2a.Dispatched.empty_like_rows: rows of %ld bytes on rank %ld are wider than the group's %ld",
                      row_bytes, rank_, layout_[ROW_BYTES]));
  *window = windows_[static_cast<size_t>(rank_)];
  return own() + layout_.y_at(static_cast<uint64_t>(handle[handle_word::EPOCH]));
}

// ------------------------------------------------------------------------------------------------------------------ life

void Group::give_up(uint64_t epoch, const std::string& text) {
  if (poisoned_) return;
  try {
    lose({FailureKind::PEER_LOST, rank_, say("call %lu on rank %ld failed: %s", epoch, rank_, text.c_str())}, epoch,
         phase::DISPATCH_ROWS);
  } catch (const Failure&) {
    // the caller throws what really happened
  }
}

void Group::close() {
  if (fork_count_ != forks.load()) return;  // the parent's windows: not ours to write to, and its threads aren't here
  closing_ = true;
  std::unique_lock lock(call_mutex_);
  // Below a signal handler of this thread: the call it interrupted ends and lets go of the windows.
  if (busy_ && holder_ == std::this_thread::get_id()) return;
  // Another thread's call looks at closing_ every few milliseconds while it waits.
  while (busy_) call_ended_.wait_for(lock, std::chrono::milliseconds(50));
  if (!closed_) leave_windows();
}

void Group::leave_windows() {
  closed_ = true;
  if (!poisoned_)
    for (int64_t peer : all_peers_)
      write_status(layout_, window(peer), rank_, status::LEFT, 0, -1, epoch_, phase::IDLE);
  std::lock_guard guard(stage_mutex_);
  for (auto& window : windows_) window.reset();  // tensors in the own window keep it mapped
}

void add_group(std::shared_ptr<Group> group) {
  std::lock_guard guard(registry_mutex);
  registry()[group->name()] = std::move(group);
}

void remove_group(const std::string& name) {
  std::lock_guard guard(registry_mutex);
  registry().erase(name);
}

std::shared_ptr<Group> find_group(const std::string& name) {
  std::lock_guard guard(registry_mutex);
  const auto found = registry().find(name);
  if (found == registry().end())
    throw Failure(FailureKind::GROUP_CLOSED,
                  say("moe_a2a: there is no open group named \"%s\" in this process; it was closed, or the name is wrong (it "
                      "is EPGroup.name)",
                      name.c_str()));
  return found->second;
}

}  // namespace moe_a2a
