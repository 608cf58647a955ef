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
    case phase::DISPATCH_PUSH: return "pushing rows in dispatch";
    case phase::COMBINE_WRITE: return "writing rows in combine";
    case phase::COMBINE_WAIT: return "waiting for rows in combine";
    case phase::COMBINE_SUM: return "summing in combine";
    default: return "unknown";
  }
}

constexpr const char* REMEDY = "The group is poisoned: close it and make a new one";

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
      flags_(layout.compact()),
      fork_count_(forks.load()),
      group_id_(static_cast<int64_t>(std::hash<std::string>{}(name_))),
      epoch_(first_epoch - 1),
      heard_(first_epoch - 1),
      done_(first_epoch - 1),
      all_done_(first_epoch - 1) {
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
  calls_.resize(static_cast<size_t>(layout[SLOTS]));
  peers_done_.assign(ranks, first_epoch - 1);
  store_u64(own() + layout_[PROGRESS] + 8 * progress_word::EPOCH, first_epoch - 1);
  seen_.assign(ranks, false);
  stages_.resize(static_cast<size_t>(layout[STAGE_SLOTS]));
  for (size_t r = 0; r < ranks; ++r)
    if (static_cast<int64_t>(r) != rank_) all_peers_.push_back(static_cast<int64_t>(r));
  // Peers are visited in a different order by every rank, so that not all of them write to rank 0 first.
  std::rotate(all_peers_.begin(), all_peers_.begin() + std::min<int64_t>(rank_, static_cast<int64_t>(all_peers_.size())),
              all_peers_.end());
  matrix_.assign(ranks * experts, 0);
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
  write_verdict(layout_, own(), static_cast<int32_t>(loss.kind));
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
                      read.epoch, REMEDY), true};
    const int pidfd = pidfds_[static_cast<size_t>(peer)];
    if (pidfd >= 0) {
      pollfd ended{pidfd, POLLIN, 0};
      if (::poll(&ended, 1, 0) > 0)
        return Loss{FailureKind::PEER_LOST, peer,
                    say("%s, call %lu on rank %ld: the process of rank %ld has ended (%s). %s", operation, epoch, rank_, peer,
                        last_seen(peer).c_str(), REMEDY), true};
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
    // Read until every rank has said that it has done with the call.
    const bool being_read = stages_[i].used_in > all_done_.load();
    if (!stages_[i].held && !being_read) {
      stages_[i] = {true, 0};
      *slot = static_cast<int64_t>(i);
      *window = windows_[static_cast<size_t>(rank_)];
      return own() + layout_.stage_at(*slot);
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
  check_handle(handle, words, "moe_a2a.Dispatched.empty_like_rows");
  if (row_bytes > layout_[ROW_BYTES])
    throw Failure(FailureKind::BAD_VALUE,
                  say("moe_a2a.Dispatched.empty_like_rows: rows of %ld bytes on rank %ld are wider than the group's %ld",
                      row_bytes, rank_, layout_[ROW_BYTES]));
  // What doesn't fit goes in waves, from ordinary memory.
  if (handle[handle_word::OUT_ROWS] > layout_[RECV_ROWS]) return nullptr;
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
