// Dispatch by pull. Phase 2, pack: the source puts its tokens and their order into its own window. Phase 3, gather: every
// owner copies the rows of its experts straight from the sources' windows into the output.
//
// Rows stand in the order (local expert, source rank, token, k), so the row of every pair follows from the send-count matrix
// and nothing travels beside it.
//
// Example, R = 2, E = 2 (rank 0 owns expert 0), K = 1: rank 0 has topk_idx {{1}, {0}}, rank 1 has {{0}, {0}}. C = {{1, 1},
// {2, 0}}. Lists by expert: rank 0 {1 | 0}, rank 1 {0, 1 | }. Rank 0 gathers its own token 1, then rank 1's tokens 0 and 1;
// rank 1 gathers rank 0's token 0. With align = 2 rank 0's rows are {1 of 0, 0 of 1, 1 of 1, zeros}.
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

// A row while it travels: its elements, its scales when it is quantised, and, when it is pushed, its weight. Bytes.
// Example: 5 int8 with one scale and a float weight: elements 0..4, scale 8..11, weight 16..19.
struct Wire {
  int64_t data_bytes;
  int64_t scale_offset;
  int64_t scale_bytes;    // 0: not quantised
  int64_t pull_bytes;     // of a row that is pulled
  int64_t weight_offset;
  int64_t weight_bytes;   // 0: no weights travel
  int64_t push_bytes;     // of a row that is pushed

  static constexpr Wire of(int64_t data_bytes, int64_t scales, int64_t weight_bytes) {
    const int64_t scale_offset = align_up(data_bytes, 4);
    const int64_t pull = scales == 0 ? data_bytes : scale_offset + 4 * scales;
    const int64_t weight_offset = align_up(pull, 8);
    return {data_bytes, scale_offset, 4 * scales, pull, weight_offset, weight_bytes,
            weight_bytes == 0 ? pull : weight_offset + weight_bytes};
  }
};

// What dispatch returns: rows [out_rows, data_bytes], weights [out_rows], scales [out_rows, scale_bytes]; packed.
struct Received {
  char* rows;
  char* weights;
  char* scales;
};

// list[start[expert] + slot] = token for every kept pair, where start is the running sum of counts.
// weights: K elements of weight_bytes each for each token, null when none travel; they go to the same places.
void pack_lists(const int32_t* expert, const int32_t* slot, const int32_t* counts, int64_t tokens, int64_t top_k,
                int64_t num_experts, int32_t* start, int32_t* list, const char* weights, int64_t weight_bytes,
                int64_t weight_token_stride, int64_t weight_k_stride, char* weight_list);

// Copies the tokens that some other rank needs into the window, each to its own row; a token all of whose experts lie in
// [local_begin, local_end) stays where it is. Returns the payload bytes copied.
int64_t pack_rows(const RowKernels& kernels, const RowsView& x, const int32_t* expert, int64_t top_k, int64_t local_begin,
                  int64_t local_end, char* to, int64_t to_stride);

// The same with every kept token quantised on its way, scales behind the elements.
int64_t quantize_rows(QuantizeRow quantize, const RowsView& x, int64_t hidden, const int32_t* expert, int64_t top_k,
                      const Wire& wire, char* to, int64_t to_stride);

// Where the rows of one source come from. x null: they don't come this way.
struct Source {
  const char* x;
  int64_t stride;
  int64_t tokens;
  const int32_t* list;
  const char* weight_list;
};

struct Gathered {
  int64_t bytes;   // payload bytes copied
  int64_t source;  // -1, or the source whose list names a token that it doesn't have
};

// matrix: C [R, E]; offsets [E_local + 1]: first row of each local expert.
Gathered gather_rows(const RowKernels& kernels, const int32_t* matrix, int64_t world_size, int64_t num_experts,
                     int64_t local_begin, int64_t local_end, const int32_t* offsets, const Source* sources, const Wire& wire,
                     bool streaming, const Received& out);

// Zeros what stands between the experts' rows and behind the last one. counts [E_local]: rows of each local expert.
void zero_padding(const int64_t* counts, const int32_t* offsets, int64_t local_experts, int64_t out_rows, const Wire& wire,
                  const Received& out);

// base[e] = the first row, among the rows its owner receives, of what `rank` sends to expert e; so that the row of a pair is
// base[expert] + slot. totals[owner] = rows the owner receives. Each expert's share is a multiple of align.
void row_bases(const int32_t* matrix, int64_t world_size, int64_t num_experts, int64_t rank, int64_t align, int32_t* base,
               int64_t* totals);

// A number that tells two rows of int32 apart; never 0.
int64_t digest(const int32_t* matrix, int64_t count);
// The same of a matrix and the number of the call it is of: two calls may have equal matrices and not the same rows.
int64_t routing_digest(const int32_t* matrix, int64_t count, uint64_t epoch);

}  // namespace moe_a2a
