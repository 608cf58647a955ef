#include "route.h"

#include <cstring>

namespace moe_a2a {
namespace {

template <class Id>
BadId count(const TopkIdx& idx, int64_t num_experts, int32_t* counts, int32_t* slot, int32_t* expert) {
  const Id* ids = static_cast<const Id*>(idx.data);
  for (int64_t token = 0; token < idx.tokens; ++token) {
    for (int64_t k = 0; k < idx.top_k; ++k) {
      const int64_t id = ids[token * idx.token_stride + k * idx.k_stride];
      const int64_t pair = token * idx.top_k + k;
      // One unsigned comparison covers both ends, at the full width of the id: 2**32 must not pass for 0.
      if (static_cast<uint64_t>(id) < static_cast<uint64_t>(num_experts)) {
        slot[pair] = counts[id]++;
      } else if (id == -1) {
        slot[pair] = -1;
      } else {
        return {true, token, k, id};
      }
      if (expert != nullptr) expert[pair] = static_cast<int32_t>(id);
    }
  }
  return {false, 0, 0, 0};
}

}  // namespace

BadId send_counts(const TopkIdx& idx, int64_t num_experts, int32_t* counts, int32_t* slot, int32_t* expert) {
  std::memset(counts, 0, static_cast<size_t>(num_experts) * sizeof(int32_t));
  return idx.wide ? count<int64_t>(idx, num_experts, counts, slot, expert)
                  : count<int32_t>(idx, num_experts, counts, slot, expert);
}

int64_t ids_digest(const int32_t* expert, int64_t pairs) {
  uint64_t sum = 0;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const uint64_t mixed = static_cast<uint64_t>(pair + 1) * 0x9e3779b97f4a7c15;
    const uint64_t factor = ((mixed ^ (mixed >> 32)) * 0xff51afd7ed558ccd) | 1;
    sum += factor * static_cast<uint64_t>(static_cast<int64_t>(expert[pair]) + 1);
  }
  return static_cast<int64_t>(sum);
}

}  // namespace moe_a2a
