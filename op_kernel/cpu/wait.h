// Waiting for a code without burning a core that the writer needs: pause, then yield, then sleep.
//
// Spinning among more ranks than cores costs milliseconds (docs/measurements.md), so the number of pauses is 0 there.
// Every few milliseconds a check runs: signals, the peers' status, the deadline. So a wait is never for ever.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

namespace moe_a2a {

struct WaitPolicy {
  int64_t pauses;    // polls with a pause between them, first
  int64_t yields;    // then polls with sched_yield between them
  int64_t sleep_ns;  // then polls this far apart
};

inline int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1000000000} + time.tv_nsec;
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int64_t CHECK_EVERY_NS = 5'000'000;

// Polls until done() is true. check(waited_ns) runs about every CHECK_EVERY_NS and throws to end the wait.
// Returns the nanoseconds waited, 0 if it was true at once (so that a call that doesn't wait reads no clock).
template <class Done, class Check>
int64_t wait_until(const WaitPolicy& policy, Done done, Check check) {
  if (done()) return 0;
  const int64_t start = now_ns();
  for (int64_t poll = 0; poll < policy.pauses; ++poll) {
    cpu_pause();
    if (done()) return now_ns() - start;
  }
  int64_t next_check = start + CHECK_EVERY_NS;
  for (int64_t poll = 0;; ++poll) {
    if (poll < policy.yields) {
      sched_yield();
    } else {
      const timespec nap{0, policy.sleep_ns};
      nanosleep(&nap, nullptr);
    }
    if (done()) return now_ns() - start;
    // A clock read costs as much as a poll; while yielding one in sixteen is enough.
    if (poll < policy.yields && (poll & 15) != 0) continue;
    const int64_t now = now_ns();
    if (now >= next_check) {
      check(now - start);
      next_check = now + CHECK_EVERY_NS;
    }
  }
}

}  // namespace moe_a2a
