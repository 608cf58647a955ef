// Routing: from topk_idx [T, K] to how many rows go to each expert, and in which order they stand.
#pragma once

#include <cstdint>

namespace moe_a2a {

// topk_idx as it lies in memory: int32 or int64, any strides (in elements).
struct TopkIdx {
  const void* data;
  bool wide;  // int64
  int64_t tokens;
  int64_t top_k;
  int64_t token_stride;
  int64_t k_stride;

  int64_t at(int64_t token, int64_t k) const {
    const int64_t where = token * token_stride + k * k_stride;
    return wide ? static_cast<const int64_t*>(data)[where] : static_cast<const int32_t*>(data)[where];
  }
};

struct BadId {
  bool found;
  int64_t token;
  int64_t k;
  int64_t value;
};

// counts[e] = pairs of expert e; slot[t, k] = how many earlier pairs, in (token, k) order, have the same expert; expert[t, k] =
// the id as int32. A pair whose id is -1 is dropped: slot -1, expert -1. An id outside -1..E-1 ends the count and is returned.
// expert may be null.
//
// Example, E = 4: topk_idx {{1, 3}, {3, -1}, {1, 1}} -> counts {0, 3, 0, 2}, slot {{0, 0}, {1, -1}, {1, 2}}.
BadId send_counts(const TopkIdx& idx, int64_t num_experts, int32_t* counts, int32_t* slot, int32_t* expert);

// A number that tells routings of one shape apart: the sum over pairs p = t K + k, modulo 2^64, of (expert[p] + 1) times an odd
// number made of p. So a pair that is dropped adds nothing, and the pairs may be summed in any order. One id that changes always
// changes it, since an odd factor loses none of the difference; what else changes it does with chances of about 2^-64 against.
//
// Example: expert {-1, -1} -> 0; {0, -1} -> 0x7fc315610e539abd; {1, -1} -> twice that, modulo 2^64; {-1, 0} -> 0x12309df51ca73579.
int64_t ids_digest(const int32_t* expert, int64_t pairs);

}  // namespace moe_a2a
