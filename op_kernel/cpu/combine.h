// Combine. The owner makes the rows its experts computed readable for their source: in its own window (pull) or in the source's
// (push). The source sums the K rows of each of its tokens, in k order.
//
// Example, R = 2, K = 2, weights {0.25, 0.75}: a token whose pairs stand in row 4 of rank 0 and row 1 of rank 1 becomes
// 0.25 * y0[4] + 0.75 * y1[1].
#pragma once

#include <cstdint>

#include "dispatch.h"
#include "layout.h"
#include "rows.h"

namespace moe_a2a {

// Copies rows [begin, begin + count) of y to `to`. code 0: as they are; else as lines of that code. Returns the payload bytes.
int64_t copy_rows(const RowKernels& kernels, const RowsView& y, int64_t begin, int64_t count, char* to, int64_t to_stride,
                  bool streaming, uint64_t line_code);

// Where the rows of one expert are that belong to this source: the row of a pair is rows + slot * stride.
struct Place {
  const char* rows;
  int64_t stride;
  bool lines;
};

// topk_weights as it lies in memory: any of the four element types, any strides (in elements).
struct Weights {
  const void* data;  // null: no weights
  Dtype dtype;
  int64_t token_stride;
  int64_t k_stride;
};

// Room that sum_tokens needs: K rows' addresses, K weights, and K rows where some stand in lines.
struct SumScratch {
  const void** rows;
  double* weights;
  char* unlined;
};

// out [T, H] contiguous in `dtype`. expert, slot: [T, K], -1 dropped. places [E].
void sum_tokens(const RowKernels& kernels, Dtype dtype, int64_t tokens, int64_t top_k, int64_t hidden, const int32_t* expert,
                const int32_t* slot, const Place* places, const Weights& weights, const SumScratch& scratch, char* out);

// out [T, K, row_bytes]: the row of every pair as it is, zeros where dropped. Of the same arguments as sum_tokens.
//
// Example, T = 1, K = 3, rows of one float: expert {0, -1, 1} with rows {5} and {7} -> {5, 0, 7}.
void take_pairs(const RowKernels& kernels, int64_t tokens, int64_t top_k, int64_t row_bytes, const int32_t* expert,
                const int32_t* slot, const Place* places, char* out);

}  // namespace moe_a2a
