// Ranks as threads: R groups over the same R windows in one process, so that ThreadSanitizer sees every ordering between them,
// and so that a rule of the protocol can be dropped (MOE_A2A_TEST_HOOKS) to see that the checks in here notice.
//
// All ranks run the same random sequence of operations, made from the seed before they start. What a rank should receive, and
// what its sums should be, is worked out here with loops over all ranks' routing, from nothing but the numbers of the plan, and
// compared bit for bit. tests/thread_ranks.py builds and runs this.
//
//   ranks params=4,0,2,... tiling=0,4000,... seed=1 steps=2000 drop=7 delay=0.2 focus=sum:0.3:2000
//
// The last line of stdout: "ok steps=..." (exit code 0), "wrong rank=.. step=.. what=..." (1), "hang ..." (2), "error ..." (3).
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "../../op_host/cpu/group.h"

namespace {

using namespace moe_a2a;

// ----------------------------------------------------------------------------------------------------- chance, and numbers

uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

template <class... More>
uint64_t mix(uint64_t first, uint64_t second, More... more) {
  return mix(mix(first) ^ (second * 0xd1342543de82ef95u + 1), static_cast<uint64_t>(more)...);
}

struct Random {
  uint64_t state;
  uint64_t next() { return mix(state++); }
  int64_t below(int64_t end) { return end <= 0 ? 0 : static_cast<int64_t>(next() % static_cast<uint64_t>(end)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(double p) { return static_cast<double>(next() >> 11) * 0x1p-53 < p; }
};

// -------------------------------------------------------------------------------------------------------------- options

struct Focus {
  std::string point;
  double chance;
  int64_t us;
  int64_t rank;  // -1: all
};

struct Options {
  Layout layout{};
  Tiling tiling{};
  std::map<std::string, std::string> text;
  std::vector<Focus> focus;
  uint64_t seed = 1;
  int64_t steps = 1000;
  double seconds = 1e9, timeout = 5, watchdog = 30, delay = 0;

  double number(const char* key, double otherwise) const {
    const auto found = text.find(key);
    return found == text.end() ? otherwise : std::stod(found->second);
  }
  std::string word(const char* key, const char* otherwise) const {
    const auto found = text.find(key);
    return found == text.end() ? otherwise : found->second;
  }
};

Options options;

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == by) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

// --------------------------------------------------------------------------------------------------------------- reports

// What each rank is doing, for a report of a hang.
struct Doing {
  std::atomic<int64_t> step{0};
  std::atomic<const char*> point{""};
  std::atomic<const char*> what{"start"};
};
Doing doing[64];
thread_local int64_t me = -1;
thread_local Random chance{0};

[[noreturn]] void report(const char* verdict, int64_t rank, int64_t step, const std::string& what) {
  static std::mutex once;
  once.lock();  // never given back: the first one speaks and ends the process
  const int64_t ranks = options.layout[WORLD_SIZE];
  for (int64_t r = 0; r < ranks; ++r)
    std::printf("rank %ld: step %ld, %s, last point \"%s\"\n", r, doing[r].step.load(), doing[r].what.load(),
                doing[r].point.load());
  std::printf("%s rank=%ld step=%ld what=%s\n", verdict, rank, step, what.c_str());
  std::fflush(stdout);
  _exit(verdict[0] == 'w' ? 1 : verdict[0] == 'h' ? 2 : 3);
}

[[noreturn]] void wrong(const std::string& what) { report("wrong", me, doing[me].step, what); }

thread_local bool throws_on = false;  // failures that nobody planned are for the scenario

[[noreturn]] void unexpected(const Failure& failure) {
  if (throws_on) throw failure;
  if (failure.kind == FailureKind::PEER_TIMEOUT || failure.kind == FailureKind::PEER_LOST)
    report("hang", me, doing[me].step, failure.what());
  wrong(say("failure %d: %s", static_cast<int>(failure.kind), failure.what()));
}

// ----------------------------------------------------------------------------------------------------------------- hooks

void sleep_us(int64_t us) {
  const timespec nap{us / 1000000, us % 1000000 * 1000};
  nanosleep(&nap, nullptr);
}

[[maybe_unused]] int dropped_rule = 0;  // set before the threads start

// A rank that stops at a point until another one has come to a point of its own; that one waits until the first is at a third
// point, where it stays until all is over.
struct Gate {
  std::string stop_at, open_at, end_at;
  std::atomic<bool> stopped{false}, opened{false}, ended{false}, over{false};
};
Gate gate;
enum class Role { PLAIN, STOPS, OPENS };
thread_local Role role = Role::PLAIN;

[[maybe_unused]] void visit(const char* name) {
  if (me < 0) return;
  doing[me].point.store(name, std::memory_order_relaxed);
  if (role == Role::STOPS && gate.stop_at == name && !gate.stopped.exchange(true))
    while (!gate.opened) sleep_us(200);
  if (role == Role::STOPS && gate.end_at == name) {
    gate.ended = true;
    while (!gate.over) sleep_us(200);
  }
  if (role == Role::OPENS && gate.open_at == name && !gate.opened.exchange(true))
    while (!gate.ended) sleep_us(200);
  for (const Focus& focus : options.focus)
    if (focus.point == name && (focus.rank < 0 || focus.rank == me) && chance.chance(focus.chance))
      return sleep_us(chance.between(focus.us / 4, focus.us));
  if (options.delay > 0 && chance.chance(options.delay)) {
    if (chance.chance(0.5)) sched_yield();
    else sleep_us(chance.between(1, 200));
  }
}

}  // namespace

#ifdef MOE_A2A_TEST_HOOKS
namespace moe_a2a {
bool dropped(Rule rule) { return static_cast<int>(rule) == dropped_rule; }
void at_point(const char* name) { visit(name); }
}  // namespace moe_a2a
#endif

namespace {

// ------------------------------------------------------------------------------------------------------------------ plan

// How a dispatch is to end on all ranks.
enum class End { GOOD, ABORTED, PAD_TOO_SMALL, MISMATCH };

struct Call {
  int64_t id = 0;
  End end = End::GOOD;
  std::vector<char> guilty;       // [R] the ranks that abort, ask for too little, or give another tag
  std::vector<char> async;        // [R]
  std::vector<char> staged;       // [R] x is a tensor in the window
  Dtype dtype = Dtype::F32, weight_dtype = Dtype::NONE;
  int64_t hidden = 1, align = 1;
  std::vector<int64_t> pads;      // [R]
  int64_t reused = -1;            // the call whose routing is used again
  std::vector<int64_t> tokens, top_k;
  std::vector<std::vector<int32_t>> ids;  // [R][T * K]
  bool fused = false;             // rows are computed where they land,
  bool in_place = false;          // and the results take their places
  bool round = false;             // no rows: rows of the routing `reused` are combined at once
  std::vector<int32_t> gradients; // [R]
  // its combine
  Dtype y_dtype = Dtype::F32, sum_dtype = Dtype::NONE;
  int64_t y_hidden = 1;
  std::vector<char> bad_y, bad_sum, y_in_window;
  std::vector<char> pairs;        // [R] wants the rows as they are
};

enum class Do { SEND, WAIT, COMBINE, GIVE, TAKE, AGAIN, LATE };

struct Step {
  Do what;
  std::vector<int64_t> calls;
};

struct Plan {
  std::vector<Call> calls;
  std::vector<Step> steps;
};

struct Pair {
  int64_t source, token, k;
};

int64_t experts_begin(int64_t rank) {
  const int64_t experts = options.layout[NUM_EXPERTS], ranks = options.layout[WORLD_SIZE];
  int64_t begin = 0;
  for (int64_t r = 0; r < rank; ++r) begin += experts / ranks + (r < experts % ranks ? 1 : 0);
  return begin;
}

// What `owner` receives, in order; source -1 is a row of zeros. counts: rows of each of its experts.
std::vector<Pair> received(const Call& call, int64_t owner, std::vector<int64_t>* counts = nullptr) {
  std::vector<Pair> rows;
  for (int64_t e = experts_begin(owner); e < experts_begin(owner + 1); ++e) {
    const size_t before = rows.size();
    for (int64_t s = 0; s < options.layout[WORLD_SIZE]; ++s)
      for (int64_t t = 0; t < call.tokens[s]; ++t)
        for (int64_t k = 0; k < call.top_k[s]; ++k)
          if (call.ids[s][t * call.top_k[s] + k] == e) rows.push_back({s, t, k});
    if (counts != nullptr) counts->push_back(static_cast<int64_t>(rows.size() - before));
    while (static_cast<int64_t>(rows.size() - before) % call.align != 0) rows.push_back({-1, 0, 0});
  }
  return rows;
}

Plan make_plan(int64_t most_steps) {
  const Layout& layout = options.layout;
  const int64_t ranks = layout[WORLD_SIZE], experts = layout[NUM_EXPERTS], slots = layout[SLOTS];
  const auto p = [](const char* key, double otherwise) { return options.number(key, otherwise); };
  const double p_async = p("async", 0.25), p_mixed = p("mixed", 0.3), p_abort = p("abort", 0.04), p_pad = p("pad", 0.15),
               p_small = p("small", 0.02), p_tag = p("tag", 0.01), p_reuse = p("reuse", 0.15), p_sparse = p("sparse", 0.4),
               p_drop = p("drop_handle", 0.12), p_bad = p("bad", 0.06), p_again = p("again", 0.05), p_window = p("window", 0.2),
               p_burst = p("burst", 0.2), p_align = p("align", 0.2), p_weights = p("weights", 0.4), p_give = p("give", 0.3),
               p_dispatch = p("dispatch", 1.0), p_one = p("one_type", 0), p_pairs = p("pairs", 0), p_round = p("round", 0),
               p_fused = layout.line() ? 0 : p("fused", 0), p_place = p("in_place", 0.7);
  Random random{mix(options.seed, 1)};
  Plan plan;
  std::vector<int64_t> pending, open, given, good;
  int64_t burst = 0;
  std::vector<char> burst_guilty;
  const auto flags = [&](double chance) {
    std::vector<char> all(static_cast<size_t>(ranks));
    for (char& one : all) one = random.chance(chance);
    return all;
  };
  const auto one_of = [&](std::vector<int64_t>& from) {
    const auto at = from.begin() + random.below(static_cast<int64_t>(from.size()));
    const int64_t id = *at;
    from.erase(at);
    return id;
  };
  const auto hidden_for = [&](Dtype dtype) {
    const int64_t most = layout[ROW_BYTES] / itemsize(dtype);
    return random.chance(0.5) || p_one > 0 ? most : random.between(1, most);
  };
  const auto send = [&] {
    Call call;
    call.id = static_cast<int64_t>(plan.calls.size());
    for (auto* list : {&pending, &open, &given})
      list->erase(std::remove_if(list->begin(), list->end(), [&](int64_t id) { return id <= call.id - slots; }), list->end());
    const Dtype types[] = {Dtype::F32, Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F64};
    do call.dtype = p_one > 0 ? Dtype::F32 : types[random.below(5)];
    while (itemsize(call.dtype) > layout[ROW_BYTES]);
    call.hidden = hidden_for(call.dtype);
    if (random.chance(p_weights)) call.weight_dtype = types[random.between(1, 4)];
    if (random.chance(p_align)) call.align = random.between(2, 4);
    call.guilty = flags(0);
    call.fused = random.chance(p_fused);
    call.round = !call.fused && !good.empty() && random.chance(p_round);
    call.pairs = flags(p_pairs);
    call.gradients.resize(static_cast<size_t>(ranks));
    if (!call.round)
      for (int32_t& bits : call.gradients) bits = static_cast<int32_t>(random.below(3) == 0 ? random.below(16) : 0);
    call.staged = flags(call.round ? 0 : p_window);
    call.async = flags(random.chance(p_async) ? (random.chance(p_mixed) ? 0.5 : 1) : 0);
    call.pads.assign(static_cast<size_t>(ranks), -1);
    call.tokens.resize(static_cast<size_t>(ranks));
    call.top_k.resize(static_cast<size_t>(ranks));
    call.ids.resize(static_cast<size_t>(ranks));
    if (call.fused || call.round) {
      call.weight_dtype = Dtype::NONE;
      call.align = 1;
      call.async = flags(0);
    }
    if (call.round || (!call.fused && !good.empty() && random.chance(p_reuse))) {
      call.reused = good[static_cast<size_t>(random.below(static_cast<int64_t>(good.size())))];
      const Call& old = plan.calls[static_cast<size_t>(call.reused)];
      call.tokens = old.tokens;
      call.top_k = old.top_k;
      call.ids = old.ids;
      if (call.round) call.align = old.align;
    } else {
      const bool sparse = random.chance(p_sparse);
      const bool full = random.chance(0.1);  // rows at high positions, now and then
      const int64_t loved = random.below(experts);
      for (int64_t r = 0; r < ranks; ++r) {
        const auto at = static_cast<size_t>(r);
        call.tokens[at] = full ? layout[MAX_TOKENS] : random.chance(0.1) ? 0 : random.between(1, layout[MAX_TOKENS]);
        call.top_k[at] = full ? layout[TOP_K] : random.between(1, layout[TOP_K]);
        const double kept = full ? 1 : sparse ? (random.chance(0.5) ? 0 : 0.15) : 0.85;
        for (int64_t pair = 0; pair < call.tokens[at] * call.top_k[at]; ++pair)
          call.ids[at].push_back(!random.chance(kept)           ? -1
                                 : random.chance(full ? 0.7 : 0.2) ? static_cast<int32_t>(loved)
                                                                 : static_cast<int32_t>(random.below(experts)));
      }
    }
    int64_t most = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      const auto rows = static_cast<int64_t>(received(call, r).size());
      most = std::max(most, rows);
      if (!call.fused && !call.round && random.chance(p_pad)) call.pads[static_cast<size_t>(r)] = rows + random.between(0, 5);
    }
    // A source that pushes in waves waits for owners, so there all wait, or none.
    if (layout[PUSH] != 0 && most > layout[RECV_ROWS] && p("mixed_waves", 0) == 0)
      std::fill(call.async.begin(), call.async.end(), call.async[0]);
    const auto guilty = static_cast<size_t>(random.below(ranks));
    if (burst > 0 || random.chance(p_abort)) {
      call.end = End::ABORTED;
      if (burst-- <= 0) {
        call.guilty[guilty] = 1;
        if (random.chance(0.2)) call.guilty[static_cast<size_t>(random.below(ranks))] = 1;
        burst = random.chance(p_burst) ? random.between(1, 3 * slots) : 0;
        burst_guilty = call.guilty;
      } else {
        call.guilty = burst_guilty;
      }
    } else if (!call.fused && !call.round && random.chance(p_small)) {
      const auto rows = static_cast<int64_t>(received(call, static_cast<int64_t>(guilty)).size());
      if (rows > 0) {
        call.end = End::PAD_TOO_SMALL;
        call.guilty[guilty] = 1;
        call.pads[guilty] = random.below(rows);
      }
    } else if (ranks > 1 && random.chance(p_tag)) {
      call.end = End::MISMATCH;
      call.guilty[guilty] = 1;
    }
    do call.y_dtype = p_one > 0 ? Dtype::F32 : std::vector{Dtype::F32, Dtype::F32, Dtype::BF16, Dtype::F64}[random.below(4)];
    while (itemsize(call.y_dtype) > layout[ROW_BYTES]);
    call.y_hidden = hidden_for(call.y_dtype);
    if (call.fused && random.chance(p_place)) {
      call.in_place = true;
      call.dtype = call.y_dtype;
      call.hidden = call.y_hidden;
    }
    if (random.chance(0.6)) call.sum_dtype = std::vector{Dtype::F32, Dtype::F64, Dtype::BF16}[random.below(3)];
    call.y_in_window = flags(p_window);
    call.bad_y = call.bad_sum = flags(0);
    if (random.chance(p_bad)) (random.chance(0.5) ? call.bad_y : call.bad_sum)[static_cast<size_t>(random.below(ranks))] = 1;
    const bool waited = std::any_of(call.async.begin(), call.async.end(), [](char one) { return one != 0; });
    if (waited) pending.push_back(call.id);
    else if (call.round) {}
    else if (call.end == End::GOOD) open.push_back(call.id), good.push_back(call.id);
    if (good.size() > 6) good.erase(good.begin());
    plan.steps.push_back({Do::SEND, {call.id}});
    plan.calls.push_back(std::move(call));
  };
  const auto wait = [&](std::vector<int64_t> ids) {
    for (int64_t id : ids)
      if (plan.calls[static_cast<size_t>(id)].end == End::GOOD) open.push_back(id), good.push_back(id);
    plan.steps.push_back({Do::WAIT, std::move(ids)});
  };
  while (static_cast<int64_t>(plan.steps.size()) < most_steps) {
    if (burst > 0) {
      send();
      continue;
    }
    const auto weight = [](const std::vector<int64_t>& list, double each) { return list.empty() ? 0.0 : each; };
    const double w_send = p_dispatch, w_wait = weight(pending, 1), w_open = weight(open, 1.2), w_given = weight(given, 1);
    double at = static_cast<double>(random.below(1 << 20)) / (1 << 20) * (w_send + w_wait + w_open + w_given);
    if ((at -= w_send) < 0) {
      send();
    } else if ((at -= w_wait) < 0) {
      if (random.chance(0.4)) {
        wait(pending);
        pending.clear();
      } else {
        wait({one_of(pending)});
      }
    } else if ((at -= w_open) < 0) {
      const int64_t id = one_of(open);
      if (random.chance(p_drop)) continue;
      if (random.chance(p_give)) {
        plan.steps.push_back({Do::GIVE, {id}});
        given.push_back(id);
      } else {
        plan.steps.push_back({Do::COMBINE, {id}});
        if (random.chance(p_again)) plan.steps.push_back({Do::AGAIN, {id}});
      }
    } else if (random.chance(0.4)) {
      plan.steps.push_back({Do::TAKE, given});
      given.clear();
    } else {
      plan.steps.push_back({Do::TAKE, {one_of(given)}});
    }
    const auto newest = static_cast<int64_t>(plan.calls.size()) - 1;
    if (newest > slots && random.chance(0.02))
      plan.steps.push_back({Do::LATE, {random.between(std::max<int64_t>(0, newest - 9), newest - slots)}});
  }
  return plan;
}

// ---------------------------------------------------------------------------------------------------------------- values

enum What : uint64_t { X = 11, WEIGHT_OF_X, Y_ROW, WEIGHT_OF_SUM };

// An element from 64 random bits: finite, and of a size that keeps every sum exact or visibly rounded.
void put_element(char* to, Dtype dtype, uint64_t bits) {
  const uint64_t exponent = (bits >> 56) % 7;  // 2^-3 .. 2^3
  const uint64_t sign = bits >> 63;
  if (dtype == Dtype::F32) {
    const auto value = static_cast<uint32_t>(sign << 31 | (124 + exponent) << 23 | (bits & 0x7fffff));
    std::memcpy(to, &value, 4);
  } else if (dtype == Dtype::F64) {
    const uint64_t value = sign << 63 | (1020 + exponent) << 52 | (bits & 0xfffffffffffff);
    std::memcpy(to, &value, 8);
  } else if (dtype == Dtype::BF16) {
    const auto value = static_cast<uint16_t>(sign << 15 | (124 + exponent) << 7 | (bits & 0x7f));
    std::memcpy(to, &value, 2);
  } else {
    const auto value = static_cast<uint16_t>(sign << 15 | (12 + exponent) << 10 | (bits & 0x3ff));
    std::memcpy(to, &value, 2);
  }
}

void put_row(char* to, Dtype dtype, int64_t hidden, uint64_t key) {
  for (int64_t column = 0; column < hidden; ++column)
    put_element(to + column * itemsize(dtype), dtype, mix(key + static_cast<uint64_t>(column) * 0x2545f4914f6cdd1du));
}

uint64_t row_key(What what, const Call& call, int64_t source, int64_t token, int64_t k, int64_t round = 0) {
  return mix(options.seed, what, call.id, source, token, k, round);
}

// What expert e of a fused call makes of a row: row * 2^(e % 8), exactly.
void compute_row(char* row, Dtype dtype, int64_t hidden, int64_t e) {
  const auto power = static_cast<uint64_t>(e % 8);
  for (int64_t column = 0; column < hidden; ++column) {
    char* at = row + column * itemsize(dtype);
    uint64_t bits = 0;
    std::memcpy(&bits, at, static_cast<size_t>(itemsize(dtype)));
    bits += power << (dtype == Dtype::F64 ? 52 : dtype == Dtype::F32 ? 23 : dtype == Dtype::BF16 ? 7 : 10);
    std::memcpy(at, &bits, static_cast<size_t>(itemsize(dtype)));
  }
}

double get_element(const char* from, Dtype dtype) {
  if (dtype == Dtype::F64) {
    double value;
    std::memcpy(&value, from, 8);
    return value;
  }
  if (dtype == Dtype::F32) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, from, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void put_sum(char* to, Dtype dtype, double sum) {
  if (dtype == Dtype::F64) {
    std::memcpy(to, &sum, 8);
    return;
  }
  const auto narrow = static_cast<float>(sum);  // it is a float's value already
  if (dtype == Dtype::F32) {
    std::memcpy(to, &narrow, 4);
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &narrow, 4);
  const uint32_t rest = bits & 0xffff, half = 0x8000;
  bits >>= 16;
  if (rest > half || (rest == half && (bits & 1) != 0)) ++bits;
  const auto value = static_cast<uint16_t>(bits);
  std::memcpy(to, &value, 2);
}

// ------------------------------------------------------------------------------------------------------------------ rank

constexpr char GARBAGE = static_cast<char>(0xd7);

struct Buffer {
  std::vector<char> bytes;
  Buffer() = default;
  explicit Buffer(int64_t size) : bytes(static_cast<size_t>(size) + 64, GARBAGE) {}
  char* data() { return bytes.data(); }
};

class Rank {
 public:
  Rank(const Plan& plan, Group& group, int64_t rank)
      : plan_(plan), group_(group), rank_(rank), at_(static_cast<size_t>(rank)), handles_(plan.calls.size()),
        given_(plan.calls.size()), spills_(plan.calls.size()) {}

  void run(const Step& step, int64_t number) {
    std::vector<int64_t> order = step.calls;  // every rank in its own
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[mix(options.seed, static_cast<uint64_t>(number), rank_, i) % i]);
    for (int64_t id : order) {
      const Call& call = plan_.calls[static_cast<size_t>(id)];
      switch (step.what) {
        case Do::SEND: say_what("dispatch"), send(call); break;
        case Do::WAIT: say_what("waiting for a dispatch"), wait(call); break;
        case Do::COMBINE: say_what("combine"), combine(call, false, 0); break;
        case Do::GIVE: say_what("beginning a combine"), combine(call, true, 0); break;
        case Do::TAKE: say_what("waiting for a combine"), take(call); break;
        case Do::AGAIN: say_what("second combine"), again(call); break;
        case Do::LATE: say_what("combine of an expired handle"), late(call); break;
      }
    }
  }

 private:
  void say_what(const char* what) { doing[rank_].what.store(what, std::memory_order_relaxed); }
  bool is(const std::vector<char>& flags) const { return flags[at_] != 0; }

  template <class Body>
  static std::optional<Failure> attempt(Body body) {
    try {
      body();
    } catch (const Failure& failure) {
      return failure;
    }
    return std::nullopt;
  }
  // Ends the run unless the failure is the wanted one.
  void expect(const std::optional<Failure>& got, FailureKind kind, const char* where) const {
    if (!got) wrong(say("%s should have raised kind %d", where, static_cast<int>(kind)));
    if (got->kind != kind) unexpected(*got);
  }

  std::optional<FailureKind> end_for(const Call& call) const {
    switch (call.end) {
      case End::GOOD: return std::nullopt;
      case End::ABORTED: return is(call.guilty) ? FailureKind::BAD_VALUE : FailureKind::PEER_ABORTED;
      case End::PAD_TOO_SMALL: return FailureKind::PAD_TOO_SMALL;
      default: return FailureKind::CALL_MISMATCH;
    }
  }

  void send(const Call& call) {
    const int64_t tokens = call.tokens[at_], top_k = call.top_k[at_], width = call.hidden * itemsize(call.dtype);
    Random random{mix(options.seed, 2, call.id, rank_)};
    Group::DispatchInput input;
    int64_t stride = width + (random.chance(0.5) ? 0 : random.between(1, 9) * itemsize(call.dtype));
    // x, in ordinary memory or in the window
    Buffer plain;
    char* x = nullptr;
    int64_t stage = -1;
    std::shared_ptr<Mapping> hold;
    if (is(call.staged)) {
      const auto busy = attempt([&] { x = group_.take_stage(tokens, width, &stage, &hold); });
      if (busy && busy->kind != FailureKind::WINDOW_BUSY) unexpected(*busy);
      if (x != nullptr && stride != width && stride > options.layout.row_stride(width)) stride = width;
    }
    if (x == nullptr) {
      plain = Buffer(tokens * stride);
      x = plain.data();
    }
    for (int64_t t = 0; t < tokens; ++t) put_row(x + t * stride, call.dtype, call.hidden, row_key(X, call, rank_, t, 0));
    input.x = {x, tokens, width, stride};
    input.hidden = call.hidden;
    input.dtype = call.dtype;
    // routing
    std::vector<int32_t> narrow;
    std::vector<int64_t> wide;
    const int64_t k_stride = random.between(1, 2), token_stride = top_k * k_stride + random.below(3);
    const bool is_wide = random.chance(0.5);
    if (call.reused >= 0) {
      const auto& handle = handles_[static_cast<size_t>(call.reused)];
      input.routing = handle.data();
      input.routing_words = static_cast<int64_t>(handle.size());
    } else {
      const auto size = static_cast<size_t>(tokens * token_stride + 1);
      narrow.assign(size, 0x7fffffff);
      wide.assign(size, int64_t{1} << 40);
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t k = 0; k < top_k; ++k) {
          const int32_t id = call.ids[at_][static_cast<size_t>(t * top_k + k)];
          narrow[static_cast<size_t>(t * token_stride + k * k_stride)] = id;
          wide[static_cast<size_t>(t * token_stride + k * k_stride)] = id;
        }
      if (is_wide) input.idx = {wide.data(), true, tokens, top_k, token_stride, k_stride};
      else input.idx = {narrow.data(), false, tokens, top_k, token_stride, k_stride};
    }
    // weights that travel
    Buffer weights;
    if (call.weight_dtype != Dtype::NONE) {
      const int64_t size = itemsize(call.weight_dtype);
      weights = Buffer((tokens * token_stride + 1) * size);
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t k = 0; k < top_k; ++k)
          put_element(weights.data() + (t * token_stride + k * k_stride) * size, call.weight_dtype,
                      row_key(WEIGHT_OF_X, call, rank_, t, k));
      input.weights = {weights.data(), call.weight_dtype, token_stride, k_stride};
    }
    input.fused = call.fused;
    input.round = call.round;
    input.gradients = call.gradients[at_];
    if (call.end == End::MISMATCH && is(call.guilty)) {
      // Another tag, or a fused call where the others dispatch, or the other way round.
      if (!call.round && !options.layout.line() && random.chance(0.5)) input.fused = !call.fused;
      else input.tag = 1;
    }
    input.pad_to = call.pads[at_];
    input.align = call.align;
    input.async = is(call.async);
    const bool aborts = call.end == End::ABORTED && is(call.guilty);
    if (aborts) {
      if (call.reused < 0 && tokens * top_k > 0 && random.chance(0.5)) {
        const auto at = static_cast<size_t>(random.below(tokens) * token_stride + random.below(top_k) * k_stride);
        narrow[at] = static_cast<int32_t>(options.layout[NUM_EXPERTS]);
        wide[at] = int64_t{1} << 32;
      } else {
        input.bad = "the harness says no";
      }
    }
    uint64_t epoch = 0;
    const auto failed = attempt([&] {
      const Group::Call guard(group_, DISPATCH);
      if (call.round) {
        run_round(call, input, random);
        return;
      }
      epoch = group_.send_dispatch(input);
      if (!input.async) receive(call, epoch);
    });
    // Whoever asked not to wait may write to x at once; a tensor in the window is let go of.
    if (!plain.bytes.empty()) std::fill(plain.bytes.begin(), plain.bytes.end(), GARBAGE);
    if (stage >= 0) group_.release_stage(stage);
    if (input.async && !aborts) {
      if (failed) unexpected(*failed);
      return;
    }
    if (const auto kind = end_for(call)) return expect(failed, *kind, "dispatch");
    if (call.round)
      if (const auto kind = combine_end(call)) return expect(failed, *kind, "a round");
    if (failed) unexpected(*failed);
  }

  // Inside a Group::Call.
  void run_round(const Call& call, const Group::DispatchInput& input, Random& random) {
    const std::vector<Pair> rows = received(call, rank_);
    const auto total = static_cast<int64_t>(rows.size());
    // A y that is shorter than the handle says is refused by open_round itself.
    const bool cut = is(call.bad_y) && total > 0 && random.chance(0.5);
    const uint64_t epoch = group_.open_round(input, cut ? total - 1 : total + random.below(3));
    if (epoch != epoch_of(call)) wrong(say("round %ld has number %lu", call.id, epoch));
    if (end_for(call) || cut) wrong("a round should have raised");
    const int64_t width = call.y_hidden * itemsize(call.y_dtype);
    Buffer y(total * width);
    for (int64_t row = 0; row < total; ++row) {
      const Pair& pair = rows[static_cast<size_t>(row)];
      if (pair.source >= 0)
        put_row(y.data() + row * width, call.y_dtype, call.y_hidden, row_key(Y_ROW, call, pair.source, pair.token, pair.k));
    }
    Group::CombineInput give;
    give.dtype = call.y_dtype;
    give.hidden = call.y_hidden;
    if (is(call.bad_y)) give.bad_y = "the harness has no rows";
    else give.y = {y.data(), total, width, width};
    group_.give_rows(epoch, give);
    finish(call, 0);
  }

  void wait(const Call& call) {
    if (!is(call.async) || (call.end == End::ABORTED && is(call.guilty))) return;
    const auto failed = attempt([&] {
      const Group::Call guard(group_, DISPATCH);
      const uint64_t epoch = epoch_of(call);
      group_.check_pending_dispatch(group_.id(), epoch);
      receive(call, epoch);
    });
    if (const auto kind = end_for(call)) return expect(failed, *kind, "waiting for a dispatch");
    if (failed) unexpected(*failed);
  }

  static uint64_t epoch_of(const Call& call) { return static_cast<uint64_t>(call.id) + 1; }

  // Inside a Group::Call.
  void receive(const Call& call, uint64_t epoch) {
    if (epoch != epoch_of(call)) wrong(say("call %ld has number %lu", call.id, epoch));
    const Group::DispatchPlan plan = group_.meet_dispatch(epoch);
    if (end_for(call)) wrong("dispatch should have raised");
    std::vector<int64_t> counts;
    const std::vector<Pair> rows = received(call, rank_, &counts);
    const auto total = static_cast<int64_t>(rows.size());
    const int64_t pad = call.pads[at_], out_rows = pad >= 0 ? pad : total, width = call.hidden * itemsize(call.dtype);
    if (plan.rows != out_rows || plan.row_bytes != width)
      wrong(say("call %ld: %ld rows of %ld bytes, expected %ld of %ld", call.id, plan.rows, plan.row_bytes, out_rows, width));
    const int64_t weight_bytes = itemsize(call.weight_dtype);
    std::vector<int64_t>& handle = handles_[static_cast<size_t>(call.id)];
    handle.assign(static_cast<size_t>(plan.handle_words), int64_t{0x5a5a5a5a5a5a5a5a});
    if (call.fused) {
      Buffer& spill = spills_[static_cast<size_t>(call.id)];
      if (!group_.fits(epoch)) spill = Buffer(out_rows * width);
      group_.begin_experts(plan, spill.bytes.empty() ? nullptr : spill.data(), handle.data());
      return check_handle(call, epoch, rows, counts, handle);
    }
    Buffer out(out_rows * width), weights(out_rows * weight_bytes);
    group_.receive_dispatch(plan, {out.data(), weight_bytes != 0 ? weights.data() : nullptr, nullptr}, handle.data());
    std::vector<char> want(static_cast<size_t>(std::max(width, weight_bytes)));
    for (int64_t row = 0; row < out_rows; ++row) {
      const Pair pair = row < total ? rows[static_cast<size_t>(row)] : Pair{-1, 0, 0};
      std::fill(want.begin(), want.end(), 0);
      if (pair.source >= 0) put_row(want.data(), call.dtype, call.hidden, row_key(X, call, pair.source, pair.token, 0));
      if (std::memcmp(want.data(), out.data() + row * width, static_cast<size_t>(width)) != 0)
        wrong(say("call %ld: row %ld of %ld (source %ld, token %ld)%s", call.id, row, out_rows, pair.source, pair.token,
                  whose(out.data() + row * width, call).c_str()));
      if (weight_bytes == 0) continue;
      std::fill(want.begin(), want.end(), 0);
      if (pair.source >= 0)
        put_element(want.data(), call.weight_dtype, row_key(WEIGHT_OF_X, call, pair.source, pair.token, pair.k));
      if (std::memcmp(want.data(), weights.data() + row * weight_bytes, static_cast<size_t>(weight_bytes)) != 0)
        wrong(say("call %ld: weight of row %ld (source %ld, token %ld)", call.id, row, pair.source, pair.token));
    }
    for (const char* end : {out.data() + out_rows * width, weights.data() + out_rows * weight_bytes})
      if (std::any_of(end, end + 64, [](char byte) { return byte != GARBAGE; })) wrong("bytes behind the output were written");
    check_handle(call, epoch, rows, counts, handle);
  }

  // Inside a Group::Call: the experts of a fused call, each when it is said to have its rows. Returns where the results are.
  Group::ExpertRows compute(const Call& call) {
    const uint64_t epoch = epoch_of(call);
    std::vector<int64_t> counts;
    const std::vector<Pair> rows = received(call, rank_, &counts);
    Buffer& spill = spills_[static_cast<size_t>(call.id)];
    const Group::ExpertRows at = group_.expert_rows(epoch, spill.bytes.empty() ? nullptr : spill.data());
    const int64_t width = call.hidden * itemsize(call.dtype);
    std::vector<char> want(static_cast<size_t>(width));
    std::vector<char> done(counts.size());
    for (int64_t e; (e = group_.next_expert(epoch)) >= 0;) {
      if (e >= static_cast<int64_t>(counts.size()) || done[static_cast<size_t>(e)]++ != 0)
        wrong(say("call %ld: expert %ld twice, or none that is here", call.id, e));
      for (int64_t row = at.offsets[e]; row < at.offsets[e + 1]; ++row) {
        const Pair& pair = rows[static_cast<size_t>(row)];
        char* place = at.rows + row * at.stride;
        put_row(want.data(), call.dtype, call.hidden, row_key(X, call, pair.source, pair.token, 0));
        if (std::memcmp(want.data(), place, static_cast<size_t>(width)) != 0)
          wrong(say("call %ld: row %ld of expert %ld (source %ld, token %ld)%s", call.id, row, e, pair.source, pair.token,
                    whose(place, call).c_str()));
        if (call.in_place) compute_row(place, call.dtype, call.hidden, experts_begin(rank_) + e);
        else std::memset(place, GARBAGE, static_cast<size_t>(width));
      }
    }
    for (size_t e = 0; e < counts.size(); ++e)
      if ((done[e] != 0) != (counts[e] > 0)) wrong(say("call %ld: expert %ld was left out", call.id, static_cast<int64_t>(e)));
    return at;
  }

  // Where a wrong row comes from, when it is a row of an older call.
  std::string whose(const char* row, const Call& call) const {
    std::vector<char> want(static_cast<size_t>(call.hidden * itemsize(call.dtype)));
    const int64_t end = std::min(call.id + 60, static_cast<int64_t>(plan_.calls.size()));
    for (int64_t id = std::max<int64_t>(0, call.id - 60); id < end; ++id) {
      const Call& old = plan_.calls[static_cast<size_t>(id)];
      for (int64_t s = 0; s < options.layout[WORLD_SIZE]; ++s)
        for (int64_t t = 0; t < old.tokens[static_cast<size_t>(s)]; ++t) {
          put_row(want.data(), call.dtype, call.hidden, row_key(X, old, s, t, 0));
          if (std::memcmp(row, want.data(), want.size()) == 0) return say(": is token %ld of rank %ld in call %ld", t, s, id);
        }
    }
    return {};
  }

  void check_handle(const Call& call, uint64_t epoch, const std::vector<Pair>& rows, const std::vector<int64_t>& counts,
                    const std::vector<int64_t>& handle) const {
    namespace w = handle_word;
    const int64_t ranks = options.layout[WORLD_SIZE], experts = options.layout[NUM_EXPERTS], tokens = call.tokens[at_],
                  top_k = call.top_k[at_];
    const auto same = [&](const char* name, int64_t have, int64_t want) {
      if (have != want) wrong(say("call %ld: %s of the handle is %ld, expected %ld", call.id, name, have, want));
    };
    same("epoch", handle[w::EPOCH], static_cast<int64_t>(epoch));
    same("rows", handle[w::ROWS], static_cast<int64_t>(rows.size()));
    int64_t gradients = 0;
    for (int32_t bits : call.gradients) gradients |= bits;
    same("gradients", handle[w::GRADIENTS], gradients);
    const auto* offsets = reinterpret_cast<const int32_t*>(handle.data() + handle[w::OFFSETS]);
    int64_t offset = 0;
    for (size_t e = 0; e < counts.size(); ++e) {
      same("counts", handle[static_cast<size_t>(handle[w::COUNTS]) + e], counts[e]);
      same("offsets", offsets[e], offset);
      offset += (counts[e] + call.align - 1) / call.align * call.align;
    }
    same("last offset", offsets[counts.size()], offset);
    const auto* matrix = reinterpret_cast<const int32_t*>(handle.data() + handle[w::MATRIX]);
    for (int64_t s = 0; s < ranks; ++s) {
      const auto& ids = call.ids[static_cast<size_t>(s)];
      same("ids", handle[static_cast<size_t>(handle[w::IDS] + s)], ids_digest(ids.data(), static_cast<int64_t>(ids.size())));
      for (int64_t e = 0; e < experts; ++e) same("matrix", matrix[s * experts + e], std::count(ids.begin(), ids.end(), e));
    }
    const auto* expert = reinterpret_cast<const int32_t*>(handle.data() + handle[w::EXPERT]);
    const auto* row = reinterpret_cast<const int32_t*>(handle.data() + handle[w::ROW]);
    std::vector<int32_t> want(static_cast<size_t>(tokens * top_k), -1);
    for (int64_t owner = 0; owner < ranks; ++owner) {
      const std::vector<Pair> theirs = received(call, owner);
      for (size_t i = 0; i < theirs.size(); ++i)
        if (theirs[i].source == rank_)
          want[static_cast<size_t>(theirs[i].token * top_k + theirs[i].k)] = static_cast<int32_t>(i);
    }
    for (size_t pair = 0; pair < want.size(); ++pair) {
      same("expert", expert[pair], call.ids[at_][pair]);
      same("row", row[pair], want[pair]);
    }
  }

  // Does this rank's combine end with an error, and which?
  std::optional<FailureKind> combine_end(const Call& call) const {
    if (is(call.bad_y) || is(call.bad_sum)) return FailureKind::BAD_VALUE;
    for (int64_t owner = 0; owner < options.layout[WORLD_SIZE]; ++owner) {
      if (owner == rank_ || call.bad_y[static_cast<size_t>(owner)] == 0) continue;
      for (int32_t e : call.ids[at_])
        if (e >= experts_begin(owner) && e < experts_begin(owner + 1)) return FailureKind::PEER_ABORTED;
    }
    return std::nullopt;
  }

  void combine(const Call& call, bool async, int64_t round) {
    const std::vector<int64_t>& handle = handles_[static_cast<size_t>(call.id)];
    const auto words = static_cast<int64_t>(handle.size());
    const std::vector<Pair> rows = received(call, rank_);
    const int64_t out_rows = handle[handle_word::OUT_ROWS], width = call.y_hidden * itemsize(call.y_dtype);
    Random random{mix(options.seed, 3, call.id, rank_)};
    Group::CombineInput input;
    input.handle = handle.data();
    input.handle_words = words;
    input.dtype = call.y_dtype;
    input.hidden = call.y_hidden;
    input.async = async;
    Buffer plain;
    std::shared_ptr<Mapping> hold;
    int64_t stride = width + (random.chance(0.6) ? 0 : random.between(1, 9) * itemsize(call.y_dtype));
    char* y = nullptr;
    const bool in_place = call.in_place && round == 0;
    const auto failed = attempt([&] {
      // A rank that refuses needn't compute. Then the peers may still be pushing, and y in the window isn't its own to write.
      const bool uncomputed = call.fused && round == 0 && is(call.bad_y) && random.chance(0.5);
      if (call.fused && round == 0 && !uncomputed) {
        const Group::Call guard(group_, MOE);
        group_.check_handle(handle.data(), words);
        const Group::ExpertRows computed = compute(call);
        if (in_place) y = computed.rows;
        if (in_place) stride = computed.stride;
      }
      if (in_place) {
      } else if (round == 0 && is(call.y_in_window)) y = group_.rows_at(handle.data(), words, width, &hold);
      if (in_place) {
      } else if (y != nullptr) {
        stride = random.chance(0.5) ? width : options.layout.row_stride(width);
      } else {
        plain = Buffer(out_rows * stride);
        y = plain.data();
      }
      for (int64_t row = 0; !in_place && !uncomputed && row < static_cast<int64_t>(rows.size()); ++row) {
        const Pair& pair = rows[static_cast<size_t>(row)];
        if (pair.source >= 0)
          put_row(y + row * stride, call.y_dtype, call.y_hidden, row_key(Y_ROW, call, pair.source, pair.token, pair.k, round));
      }
      const Group::Call guard(group_, COMBINE);
      group_.check_handle(handle.data(), words);
      if (is(call.bad_y)) {
        input.bad_y = "the harness has no rows";
      } else {
        input.y = {y, out_rows, width, stride};
        if (is(call.bad_sum) && !async) input.bad_sum = "the harness has no weights";
      }
      group_.give_rows(epoch_of(call), input);
      if (async) {
        given_[static_cast<size_t>(call.id)] = 1;
        return;
      }
      finish(call, round);
    });
    std::fill(plain.bytes.begin(), plain.bytes.end(), GARBAGE);
    auto& spill = spills_[static_cast<size_t>(call.id)].bytes;
    if (round == 0) std::fill(spill.begin(), spill.end(), GARBAGE);
    const auto kind = combine_end(call);
    if (!failed && !async && kind) wrong(say("combine should have raised kind %d", static_cast<int>(*kind)));
    if (!failed) return;
    if (!kind || failed->kind != *kind) unexpected(*failed);
  }

  // Inside a Group::Call.
  void finish(const Call& call, int64_t round) {
    const int64_t tokens = call.tokens[at_], top_k = call.top_k[at_], width = call.y_hidden * itemsize(call.y_dtype);
    Random random{mix(options.seed, 4, call.id, rank_)};
    const int64_t k_stride = random.between(1, 2), token_stride = top_k * k_stride + random.below(3);
    Buffer data;
    Weights weights{};
    std::string bad;
    if (call.sum_dtype != Dtype::NONE) {
      const int64_t size = itemsize(call.sum_dtype);
      data = Buffer((tokens * token_stride + 1) * size);  // weights of dropped pairs stay garbage
      std::memset(data.data(), 0xff, data.bytes.size());
      for (int64_t t = 0; t < tokens; ++t)
        for (int64_t k = 0; k < top_k; ++k)
          if (call.ids[at_][static_cast<size_t>(t * top_k + k)] >= 0)
            put_element(data.data() + (t * token_stride + k * k_stride) * size, call.sum_dtype,
                        row_key(WEIGHT_OF_SUM, call, rank_, t, k));
      weights = {data.data(), call.sum_dtype, token_stride, k_stride};
    }
    if (is(call.bad_sum)) bad = "the harness has no weights";
    const bool pairs = is(call.pairs);
    const int64_t out_width = (pairs ? top_k : 1) * width;
    Buffer out(tokens * out_width);
    group_.take_rows(epoch_of(call), weights, bad, FailureKind::BAD_VALUE, out.data(), pairs);
    if (combine_end(call)) wrong("combine should have raised");
    std::vector<char> row(static_cast<size_t>(width)), want(static_cast<size_t>(width));
    const auto result_of = [&](int64_t t, int64_t k, char* to) {
      const int32_t e = call.ids[at_][static_cast<size_t>(t * top_k + k)];
      if (call.in_place && round == 0) {
        put_row(to, call.dtype, call.hidden, row_key(X, call, rank_, t, 0));
        compute_row(to, call.dtype, call.hidden, e);
      } else {
        put_row(to, call.y_dtype, call.y_hidden, row_key(Y_ROW, call, rank_, t, k, round));
      }
    };
    for (int64_t pair = 0; pairs && pair < tokens * top_k; ++pair) {
      std::fill(want.begin(), want.end(), 0);
      if (call.ids[at_][static_cast<size_t>(pair)] >= 0) result_of(pair / top_k, pair % top_k, want.data());
      if (std::memcmp(want.data(), out.data() + pair * width, static_cast<size_t>(width)) != 0)
        wrong(say("call %ld: pair %ld of %ld", call.id, pair, tokens * top_k));
    }
    const bool doubles = call.y_dtype == Dtype::F64;
    const int64_t step = itemsize(call.y_dtype);
    std::vector<double> sums(static_cast<size_t>(call.y_hidden));
    for (int64_t t = 0; !pairs && t < tokens; ++t) {
      bool first = true;
      std::fill(sums.begin(), sums.end(), 0.0);
      for (int64_t k = 0; k < top_k; ++k) {
        if (call.ids[at_][static_cast<size_t>(t * top_k + k)] < 0) continue;
        result_of(t, k, row.data());
        for (int64_t column = 0; column < call.y_hidden; ++column) {
          double& sum = sums[static_cast<size_t>(column)];
          double term = get_element(row.data() + column * step, call.y_dtype);
          if (weights.data != nullptr) {
            const double weight = get_element(static_cast<const char*>(weights.data) +
                                                  (t * token_stride + k * k_stride) * itemsize(call.sum_dtype),
                                              call.sum_dtype);
            // A product, or a sum, of two floats in double, rounded to float, is what a float operation gives.
            term = doubles ? weight * term : static_cast<double>(static_cast<float>(static_cast<float>(weight) * term));
          }
          sum = first ? term : doubles ? sum + term : static_cast<double>(static_cast<float>(sum + term));
        }
        first = false;
      }
      for (int64_t column = 0; column < call.y_hidden; ++column)
        put_sum(want.data() + column * step, call.y_dtype, sums[static_cast<size_t>(column)]);
      if (std::memcmp(want.data(), out.data() + t * width, static_cast<size_t>(width)) != 0)
        wrong(say("combine of call %ld: token %ld of %ld", call.id, t, tokens));
    }
    const char* end = out.data() + tokens * out_width;
    if (std::any_of(end, end + 64, [](char byte) { return byte != GARBAGE; })) wrong("bytes behind the sums were written");
  }

  void take(const Call& call) {
    if (given_[static_cast<size_t>(call.id)] == 0) return;  // it ended when it began
    const auto failed = attempt([&] {
      const Group::Call guard(group_, COMBINE);
      group_.check_pending_combine(group_.id(), epoch_of(call));
      finish(call, 0);
    });
    if (const auto kind = combine_end(call)) return expect(failed, *kind, "waiting for a combine");
    if (failed) unexpected(*failed);
  }

  // A second combine is refused. again_runs: where it isn't, it is carried out, and what it does to the first one must show.
  void again(const Call& call) {
    const std::vector<int64_t>& handle = handles_[static_cast<size_t>(call.id)];
    const auto refused = attempt([&] {
      const Group::Call guard(group_, COMBINE);
      group_.check_handle(handle.data(), static_cast<int64_t>(handle.size()));
    });
    if (!refused && options.number("again_runs", 0) != 0) return combine(call, false, 1);
    expect(refused, FailureKind::HANDLE_EXPIRED, "a second combine");
  }

  void late(const Call& call) {
    const std::vector<int64_t>& handle = handles_[static_cast<size_t>(call.id)];
    const Group::Call guard(group_, COMBINE);
    if (!handle.empty())
      expect(attempt([&] { group_.check_handle(handle.data(), static_cast<int64_t>(handle.size())); }),
             FailureKind::HANDLE_EXPIRED, "an expired handle");
    expect(attempt([&] { group_.check_pending_dispatch(group_.id(), epoch_of(call)); }), FailureKind::HANDLE_EXPIRED,
           "waiting for an expired dispatch");
    expect(attempt([&] { group_.check_pending_combine(group_.id(), epoch_of(call)); }), FailureKind::HANDLE_EXPIRED,
           "waiting for an expired combine");
  }

  const Plan& plan_;
  Group& group_;
  const int64_t rank_;
  const size_t at_;
  std::vector<std::vector<int64_t>> handles_;
  std::vector<char> given_;
  std::vector<Buffer> spills_;  // rows of fused calls that came in waves
};

// ------------------------------------------------------------------------------------------------------------------ runs

using Windows = std::vector<std::shared_ptr<Mapping>>;

Windows new_windows() {
  Windows windows;
  const int64_t bytes = options.layout[TOTAL_BYTES];
  const int64_t page = sysconf(_SC_PAGESIZE);
  for (int64_t r = 0; r < options.layout[WORLD_SIZE]; ++r) {
    // With a page that can't be touched on both sides.
    void* whole = mmap(nullptr, static_cast<size_t>(bytes + 2 * page), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char* at = static_cast<char*>(whole) + page;
    if (whole == MAP_FAILED || mprotect(at, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE) != 0)
      report("error", -1, 0, "no memory for the windows");
    windows.push_back(std::make_shared<Mapping>(at, bytes));
  }
  return windows;
}

std::unique_ptr<Group> new_group(int64_t rank, const Layout& layout, const Windows& windows, double timeout,
                                 uint64_t first_epoch = 1) {
  const auto ns = static_cast<int64_t>(timeout * 1e9);
  return std::make_unique<Group>("harness", layout, rank, options.tiling, windows, std::vector<int>(windows.size(), -1), ns, ns,
                                 first_epoch);
}

void become(int64_t rank, Role as = Role::PLAIN) {
  me = rank;
  role = as;
  chance = {mix(options.seed, 99, rank, static_cast<uint64_t>(as))};
}

void run_random() {
  const Plan plan = make_plan(options.steps);
  const int64_t ranks = options.layout[WORLD_SIZE], steps = static_cast<int64_t>(plan.steps.size());
  const Windows windows = new_windows();
  std::vector<std::unique_ptr<Group>> groups;
  for (int64_t r = 0; r < ranks; ++r) groups.push_back(new_group(r, options.layout, windows, options.timeout));
  // All ranks must end at the same step: the first to come to a checkpoint decides for all whether there is time to go on.
  constexpr int64_t EVERY = 32;
  std::vector<std::atomic<int>> checkpoints(static_cast<size_t>(steps / EVERY + 1));
  const int64_t start = now_ns();
  const auto goes_on = [&](int64_t step) {
    if (step % EVERY != 0) return true;
    std::atomic<int>& decision = checkpoints[static_cast<size_t>(step / EVERY)];
    int undecided = 0;
    decision.compare_exchange_strong(undecided, static_cast<double>(now_ns() - start) * 1e-9 < options.seconds ? 1 : 2);
    return decision == 1;
  };
  std::atomic<int64_t> running{ranks};
  std::vector<std::thread> threads, others;
  // A second thread of each rank does what may be done beside a call.
  if (options.number("others", 0) != 0)
    for (int64_t r = 0; r < ranks; ++r)
      others.emplace_back([&, r] {
        Group& group = *groups[static_cast<size_t>(r)];
        while (running > 0) {
          int64_t slot = -1;
          std::shared_ptr<Mapping> hold;
          try {
            char* x = group.take_stage(options.layout[MAX_TOKENS], options.layout[ROW_BYTES], &slot, &hold);
            std::memset(x, GARBAGE, static_cast<size_t>(options.layout[MAX_TOKENS] * options.layout[ROW_BYTES]));
            group.release_stage(slot);
          } catch (const Failure& failure) {
            if (failure.kind != FailureKind::WINDOW_BUSY) report("wrong", r, -1, failure.what());
          }
          sleep_us(300);
        }
      });
  for (int64_t r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      become(r);
      try {
        Rank rank(plan, *groups[static_cast<size_t>(r)], r);
        int64_t step = 0;
        for (; step < steps && goes_on(step); ++step) {
          doing[r].step.store(step, std::memory_order_relaxed);
          rank.run(plan.steps[static_cast<size_t>(step)], step);
        }
        doing[r].step.store(step, std::memory_order_relaxed);
      } catch (const Failure& failure) {
        unexpected(failure);
      } catch (const std::exception& error) {
        report("error", r, doing[r].step, error.what());
      }
      --running;
    });
  int64_t last = -1, since = now_ns();
  while (running > 0) {
    sleep_us(2000);
    int64_t sum = 0;
    for (int64_t r = 0; r < ranks; ++r) sum += doing[r].step.load(std::memory_order_relaxed);
    if (sum != last) last = sum, since = now_ns();
    if (static_cast<double>(now_ns() - since) * 1e-9 > options.watchdog)
      report("hang", -1, last / ranks, "no step for a long time");
  }
  for (auto& thread : threads) thread.join();
  for (auto& thread : others) thread.join();
  Counters all{};
  for (const auto& group : groups) {
    all.dispatches += group->counters().dispatches;
    all.combines += group->counters().combines;
    all.pushes += group->counters().pushes;
    all.waves += group->counters().waves;
    group->close();
  }
  std::printf("ok steps=%ld dispatches=%ld combines=%ld pushes=%ld waves=%ld seconds=%.2f\n", doing[0].step.load(),
              all.dispatches, all.combines, all.pushes, all.waves, static_cast<double>(now_ns() - start) * 1e-9);
}

// A plan of one call in which every token of every rank goes to every expert: `id` says which numbers it carries.
Plan one_call(int64_t id) {
  const int64_t ranks = options.layout[WORLD_SIZE], tokens = options.layout[MAX_TOKENS], top_k = options.layout[TOP_K];
  const auto each = static_cast<size_t>(ranks);
  Plan plan;
  for (int64_t i = 0; i <= id; ++i) {
    Call call;
    call.id = i;
    call.hidden = call.y_hidden = options.layout[ROW_BYTES] / itemsize(Dtype::F32);
    call.guilty = call.async = call.staged = call.bad_y = call.bad_sum = call.y_in_window = std::vector<char>(each, 0);
    call.pads.assign(each, -1);
    call.pairs.assign(each, 0);
    call.gradients.assign(each, 0);
    call.tokens.assign(each, tokens);
    call.top_k.assign(each, top_k);
    std::vector<int32_t> ids;
    for (int64_t pair = 0; pair < tokens * top_k; ++pair)
      ids.push_back(static_cast<int32_t>(pair % options.layout[NUM_EXPERTS]));
    call.ids.assign(each, ids);
    plan.calls.push_back(std::move(call));
  }
  plan.steps = {{Do::SEND, {id}}, {Do::COMBINE, {id}}};
  return plan;
}

// Rank 1 stops in the middle of a push. The others give it up and all make new groups, a new rank 1 among them; when the new
// rank 0 has the codes of all rows of its first call but has read none, the old rank 1 goes on writing. On the same windows its
// rows land in the new call, and no check before writing can close that race; new windows can't be reached by it.
void run_rebuild(bool new_memory) {
  const int64_t ranks = options.layout[WORLD_SIZE];
  gate.stop_at = "push row";
  gate.open_at = "take rows";
  gate.end_at = "before gather";
  const Windows first = new_windows();
  const Plan old_plan = one_call(0);
  std::vector<std::unique_ptr<Group>> groups;
  for (int64_t r = 0; r < ranks; ++r) groups.push_back(new_group(r, options.layout, first, 0.3));
  const auto once = [&](Group& group, const Plan& plan, int64_t rank) {
    Group::DispatchInput input;
    const Call& call = plan.calls.back();
    const int64_t tokens = call.tokens[0], width = call.hidden * 4;
    Buffer x(tokens * width);
    for (int64_t t = 0; t < tokens; ++t) put_row(x.data() + t * width, call.dtype, call.hidden, row_key(X, call, rank, t, 0));
    input.x = {x.data(), tokens, width, width};
    input.hidden = call.hidden;
    input.dtype = call.dtype;
    input.idx = {call.ids[0].data(), false, tokens, call.top_k[0], call.top_k[0], 1};
    const Group::Call guard(group, DISPATCH);
    const auto sent = group.meet_dispatch(group.send_dispatch(input));
    Buffer out(sent.rows * width);
    std::vector<int64_t> handle(static_cast<size_t>(sent.handle_words));
    group.receive_dispatch(sent, {out.data(), nullptr, nullptr}, handle.data());
  };
  std::vector<std::thread> old_ranks;
  std::atomic<int64_t> lost{0};
  for (int64_t r = 0; r < ranks; ++r)
    old_ranks.emplace_back([&, r] {
      become(r, r == 1 ? Role::STOPS : Role::PLAIN);
      try {
        once(*groups[static_cast<size_t>(r)], old_plan, r);
      } catch (const Failure&) {
        ++lost;
      }
    });
  while (!gate.stopped || lost < ranks - 1) sleep_us(1000);
  Layout next = options.layout;
  next.p[GENERATION] += 1;
  const Windows windows = new_memory ? new_windows() : first;
  if (!new_memory)  // as clean as can be: it isn't what stands there that does the harm
    for (const auto& window : windows) std::memset(window->address, 0, static_cast<size_t>(window->bytes));
  // The first call that uses the slot of the one that never ended.
  const int64_t id = options.layout[SLOTS];
  const Plan plan = one_call(id);
  std::vector<std::unique_ptr<Group>> new_groups;
  for (int64_t r = 0; r < ranks; ++r)
    new_groups.push_back(new_group(r, next, windows, options.timeout, static_cast<uint64_t>(id) + 1));
  std::vector<std::thread> new_ranks;
  for (int64_t r = 0; r < ranks; ++r)
    new_ranks.emplace_back([&, r] {
      become(r, r == 0 ? Role::OPENS : Role::PLAIN);
      try {
        Rank rank(plan, *new_groups[static_cast<size_t>(r)], r);
        for (const Step& step : plan.steps) rank.run(step, 0);
      } catch (const Failure& failure) {
        unexpected(failure);
      }
    });
  for (auto& thread : new_ranks) thread.join();
  gate.over = true;
  for (auto& thread : old_ranks) thread.join();
  std::printf("ok steps=1 lost=%ld\n", lost.load());
}

// Rank 0 drops the handle of a call whose rows it has and goes on; rank 1 combines, and can only time out: its message must say
// where rank 0 is.
void run_owner_drops() {
  const Windows windows = new_windows();
  const Plan plan = one_call(1);
  std::string told[2];
  FailureKind kinds[2]{};
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      become(r);
      const auto group = new_group(r, options.layout, windows, r == 0 ? options.timeout : 0.3);
      try {
        Rank rank(plan, *group, r);
        rank.run({Do::SEND, {0}}, 0);
        throws_on = true;
        rank.run({r == 0 ? Do::SEND : Do::COMBINE, {r == 0 ? 1 : 0}}, 1);
      } catch (const Failure& failure) {
        told[r] = failure.what();
        kinds[r] = failure.kind;
      }
    });
  for (auto& thread : threads) thread.join();
  if (kinds[1] != FailureKind::PEER_TIMEOUT || told[1].find("nothing from rank 0") == std::string::npos ||
      told[1].find("rank 0 was last seen in call 2") == std::string::npos)
    report("wrong", 1, 1, "the source says: " + told[1]);
  if (kinds[0] != FailureKind::PEER_LOST || told[0].find("rank 1 gave the group up in call 1") == std::string::npos)
    report("wrong", 0, 1, "the owner says: " + told[0]);
  std::printf("ok steps=2\n");
}

// Rank 0 waits in dispatch; another thread of it closes its group. Rank 1 comes then: what rank 0 had sent is good, and the
// next call hears that it has left.
void run_close() {
  const Windows windows = new_windows();
  const Plan plan = one_call(1);
  std::vector<std::unique_ptr<Group>> groups;
  for (int64_t r = 0; r < 2; ++r) groups.push_back(new_group(r, options.layout, windows, options.timeout));
  const auto run = [&](int64_t r, int64_t id) {
    std::optional<FailureKind> kind;
    std::thread([&] {
      become(r);
      throws_on = true;
      try {
        Rank(plan, *groups[static_cast<size_t>(r)], r).run({Do::SEND, {id}}, id);
      } catch (const Failure& failure) {
        kind = failure.kind;
      }
    }).join();
    return kind;
  };
  std::thread closes([&] {
    sleep_us(20000);
    groups[0]->close();
  });
  if (run(0, 0) != FailureKind::GROUP_CLOSED) report("wrong", 0, 0, "a call that its own close() should have ended");
  closes.join();
  if (run(1, 0)) report("wrong", 1, 0, "what a rank sent before it left wasn't taken");
  if (run(1, 1) != FailureKind::PEER_LOST) report("wrong", 1, 1, "a call with a rank that has left");
  std::printf("ok steps=2\n");
}

// Rank 0 sends its part of a call and leaves, while rank 1 is on its way from a poll to a look at who has left, and rank 2 is
// merely late: nothing is lost.
void run_leave_late() {
  int64_t steps = 0;
  for (const int64_t end = now_ns() + static_cast<int64_t>(options.seconds * 1e9); now_ns() < end; ++steps) {
    const Windows windows = new_windows();
    Plan plan = one_call(0);
    plan.calls[0].async[0] = 1;
    std::vector<std::unique_ptr<Group>> groups;
    for (int64_t r = 0; r < 3; ++r) groups.push_back(new_group(r, options.layout, windows, options.timeout));
    std::vector<std::thread> threads;
    for (int64_t r = 0; r < 3; ++r)
      threads.emplace_back([&, r] {
        become(r);
        sleep_us(r == 0 ? 6000 + steps % 8 * 1000 : r == 2 ? 40000 : 0);
        try {
          Rank(plan, *groups[static_cast<size_t>(r)], r).run({Do::SEND, {0}}, 0);
        } catch (const Failure& failure) {
          unexpected(failure);
        }
        if (r == 0) groups[0]->close();
      });
    for (auto& thread : threads) thread.join();
  }
  std::printf("ok steps=%ld\n", steps);
}

}  // namespace

int main(int count, char** arguments) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    const size_t at = argument.find('=');
    if (at == std::string::npos) report("error", -1, 0, "expected key=value: " + argument);
    const std::string key = argument.substr(0, at), value = argument.substr(at + 1);
    options.text[key] = value;
    if (key == "focus")
      for (const std::string& one : split(value, ',')) {
        const auto parts = split(one, ':');
        const int64_t rank = parts.size() > 3 ? std::stol(parts[3]) : -1;
        options.focus.push_back({parts.at(0), std::stod(parts.at(1)), std::stol(parts.at(2)), rank});
      }
  }
  const auto params = split(options.word("params", ""), ','), tiling = split(options.word("tiling", ""), ',');
  if (params.size() != LAYOUT_PARAMS || tiling.size() != TILING_PARAMS)
    report("error", -1, 0, say("expected %d params and %d tiling numbers", static_cast<int>(LAYOUT_PARAMS), TILING_PARAMS));
  for (size_t i = 0; i < params.size(); ++i) options.layout.p[i] = std::stoll(params[i]);
  int64_t t[TILING_PARAMS];
  for (size_t i = 0; i < tiling.size(); ++i) t[i] = std::stoll(tiling[i]);
  options.tiling = {{t[0], t[1], t[2]}, t[3], t[4], t[5], t[6], t[7], t[8], t[9]};
  options.seed = static_cast<uint64_t>(options.number("seed", 1));
  options.steps = static_cast<int64_t>(options.number("steps", 1000));
  options.seconds = options.number("seconds", 1e9);
  options.timeout = options.number("timeout", 5);
  options.watchdog = options.number("watchdog", 30);
  options.delay = options.number("delay", 0);
  dropped_rule = static_cast<int>(options.number("drop", 0));
  const std::string scenario = options.word("scenario", "random");
  if (scenario == "random") run_random();
  else if (scenario == "rebuild same") run_rebuild(false);
  else if (scenario == "rebuild new") run_rebuild(true);
  else if (scenario == "owner drops") run_owner_drops();
  else if (scenario == "close") run_close();
  else if (scenario == "leave late") run_leave_late();
  else report("error", -1, 0, "no scenario " + scenario);
}
