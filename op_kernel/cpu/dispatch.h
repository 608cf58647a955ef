// Dispatch by pull. Phase 2, pack: the source puts its tokens and their order into its own window. Phase 3, gather: every
// owner copies the rows of its experts straight from the sources' windows into the output.
//
// Rows stand in the order (local expert, source rank, token, k), so the row of every pair follows from the send-count matrix
// and nothing travels beside it.
//
// Example, R = 2, E = 2 (rank 0 owns expert 0), K = 1: rank 0 has topk_idx {{1}, {0}}, rank 1 has {{0}, {0}}. C = {{1, 1},
// {2, 0}}. Lists by expert: rank 0 {1 | 0}, rank 1 {0, 1 | }. Rank 0 gathers its own token 1, then rank 1's tokens 0 and 1;
// rank 1 gathers rank 0's token 0.
#pragma once

#include <cstdint>

#include "layout.h"
#include "rows.h"

namespace moe_a2a {

// x [T, H] as it lies in memory.
struct RowsView {
  const char* data;
  int64_t rows;
  int64_t row_bytes;
  int64_t stride;  // bytes from row to row
};

// list[start[expert] + slot] = token for every kept pair, where start is the running sum of counts.
// weights: K elements of weight_bytes each for each token, null when none travel; they go to the same places.
void pack_lists(const int32_t* expert, const int32_t* slot, const int32_t* counts, int64_t tokens, int64_t top_k,
                int64_t num_experts, int32_t* start, int32_t* list, const char* weights, int64_t weight_bytes,
                int64_t weight_token_stride, int64_t weight_k_stride, char* weight_list);

// Copies the tokens that some other rank needs into the window, each to its own row; a token all of whose experts are local
// stays where it is. Returns the payload bytes copied.
int64_t pack_rows(const RowKernels& kernels, const RowsView& x, const int32_t* expert, int64_t top_k, int64_t local_begin,
                  int64_t local_end, char* to, int64_t to_stride);

// Where the rows of one source come from.
struct Source {
  const char* x;
  int64_t stride;
  const int32_t* list;
  const char* weight_list;
};

// matrix: C [R, E]. Writes out [N, row_bytes] and, where weight_bytes is not 0, out_weights [N]. Returns the payload bytes copied.
int64_t gather_rows(const RowKernels& kernels, const int32_t* matrix, int64_t world_size, int64_t num_experts,
                    int64_t local_begin, int64_t local_end, const Source* sources, int64_t row_bytes, bool streaming,
                    char* out, int64_t weight_bytes, char* out_weights);

// base[e] = the first row, among the rows its owner receives, of what `rank` sends to expert e; so that the row of a pair is
// base[expert] + slot.
void row_bases(const int32_t* matrix, int64_t world_size, int64_t num_experts, int64_t rank, int32_t* base);

}  // namespace moe_a2a
