// Combine by pull. The owner makes the rows its experts computed readable in its window; the source sums the K rows of each
// of its tokens, in k order, straight from the owners' windows.
//
// Example, R = 2, K = 2, weights {0.25, 0.75}: a token whose pairs stand in row 4 of rank 0 and row 1 of rank 1 becomes
// 0.25 * y0[4] + 0.75 * y1[1].
#pragma once

#include <cstdint>

#include "dispatch.h"
#include "layout.h"
#include "rows.h"

namespace moe_a2a {

// Copies the rows that came from `source` from y to their places in the window. Returns the payload bytes copied.
int64_t write_rows(const RowKernels& kernels, const RowsView& y, const int32_t* matrix, int64_t world_size,
                   int64_t num_experts, int64_t local_begin, int64_t local_end, int64_t source, char* to,
                   int64_t to_stride);

// Where the rows of one owner are.
struct Owner {
  const char* y;
  int64_t stride;
};

// topk_weights as it lies in memory: any of the four element types, any strides (in elements).
struct Weights {
  const void* data;  // null: no weights
  Dtype dtype;
  int64_t token_stride;
  int64_t k_stride;
};

// out [T, H] contiguous in `dtype`. expert, row: [T, K], -1 dropped. scratch_rows and scratch_weights: room for K entries of
// 8 bytes. owner_of[e]: the rank that owns expert e.
void sum_tokens(const RowKernels& kernels, Dtype dtype, int64_t tokens, int64_t top_k, int64_t hidden,
                const int32_t* expert, const int32_t* row, const int32_t* owner_of, const Owner* owners,
                const Weights& weights, const void** scratch_rows, double* scratch_weights, char* out);

}  // namespace moe_a2a
