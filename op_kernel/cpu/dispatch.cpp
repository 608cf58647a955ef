#include "dispatch.h"

#include <cstring>

namespace moe_a2a {

void pack_lists(const int32_t* expert, const int32_t* slot, const int32_t* counts, int64_t tokens, int64_t top_k,
                int64_t num_experts, int32_t* start, int32_t* list, const char* weights, int64_t weight_bytes,
                int64_t weight_token_stride, int64_t weight_k_stride, char* weight_list) {
  int32_t sum = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    start[e] = sum;
    sum += counts[e];
  }
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t pair = token * top_k + k;
      if (expert[pair] < 0) continue;
      const int64_t at = start[expert[pair]] + slot[pair];
      list[at] = static_cast<int32_t>(token);
      if (weights != nullptr)
        std::memcpy(weight_list + at * weight_bytes, weights + token * weight_token_stride + k * weight_k_stride,
                    static_cast<size_t>(weight_bytes));
    }
  }
}

int64_t pack_rows(const RowKernels& kernels, const RowsView& x, const int32_t* expert, int64_t top_k, int64_t local_begin,
                  int64_t local_end, char* to, int64_t to_stride) {
  int64_t bytes = 0;
  for (int64_t token = 0; token < x.rows; ++token) {
    bool travels = false;
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t e = expert[token * top_k + k];
      travels |= e >= 0 && (e < local_begin || e >= local_end);
    }
    if (!travels) continue;
    kernels.copy(to + token * to_stride, x.data + token * x.stride, static_cast<size_t>(x.row_bytes));
    bytes += x.row_bytes;
  }
  return bytes;
}

int64_t gather_rows(const RowKernels& kernels, const int32_t* matrix, int64_t world_size, int64_t num_experts,
                    int64_t local_begin, int64_t local_end, const Source* sources, int64_t row_bytes, bool streaming,
                    char* out, int64_t weight_bytes, char* out_weights) {
  const auto copy = streaming ? kernels.copy_streaming : kernels.copy;
  // Where each source's list stands: its pairs of earlier experts come first.
  int64_t cursor[256];
  int64_t* at = world_size <= 256 ? cursor : new int64_t[static_cast<size_t>(world_size)];
  for (int64_t s = 0; s < world_size; ++s) {
    at[s] = 0;
    for (int64_t e = 0; e < local_begin; ++e) at[s] += matrix[s * num_experts + e];
  }
  int64_t row = 0;
  for (int64_t e = local_begin; e < local_end; ++e) {
    for (int64_t s = 0; s < world_size; ++s) {
      const int64_t count = matrix[s * num_experts + e];
      const Source& source = sources[s];
      for (int64_t i = 0; i < count; ++i)
        copy(out + (row + i) * row_bytes, source.x + source.list[at[s] + i] * source.stride,
             static_cast<size_t>(row_bytes));
      if (weight_bytes != 0)
        std::memcpy(out_weights + row * weight_bytes, source.weight_list + at[s] * weight_bytes,
                    static_cast<size_t>(count * weight_bytes));
      at[s] += count;
      row += count;
    }
  }
  if (at != cursor) delete[] at;
  if (streaming) kernels.fence();
  return row * row_bytes;
}

void row_bases(const int32_t* matrix, int64_t world_size, int64_t num_experts, int64_t rank, int32_t* base) {
  for (int64_t owner = 0; owner < world_size; ++owner) {
    int32_t row = 0;
    const int64_t end = first_expert(owner + 1, num_experts, world_size);
    for (int64_t e = first_expert(owner, num_experts, world_size); e < end; ++e) {
      for (int64_t s = 0; s < world_size; ++s) {
        if (s == rank) base[e] = row;
        row += matrix[s * num_experts + e];
      }
    }
  }
}

}  // namespace moe_a2a
