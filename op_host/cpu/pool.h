// Memory for outputs. Fresh pages nearly double the time of a call at prefill sizes (docs/measurements.md), so blocks are kept and handed out
// again; large ones are mapped on huge-page boundaries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_a2a {

// At least `bytes`, aligned to 64. Throws std::bad_alloc. Thread safe.
void* pool_take(size_t bytes);
// Gives a block of pool_take back; any thread.
void pool_give(void* block);
// Frees what is kept and not in use; returns the bytes freed.
size_t pool_trim();

// For tests: from now on every block handed out is filled with this byte first (0xff is a NaN in every float type); -1: not.
void pool_fill(int byte);

// Bytes of memory that this host has left.
int64_t free_memory();

struct PoolStats {
  uint64_t held_bytes;    // in use
  uint64_t kept_bytes;    // given back and kept
  uint64_t takes;         // blocks handed out
  uint64_t reused;        // of these, from what was kept
};
PoolStats pool_stats();

}  // namespace moe_a2a
