// What is done to rows: copy one, sum K of them with weights, or quantise one. One implementation a CPU, chosen once at load.
#pragma once

#include <cstddef>
#include <cstdint>

#include "activation.h"
#include "layout.h"
#include "quantize.h"

namespace moe_a2a {

// out[H] = sum over terms, in order, of weight[i] * rows[i][H]: multiply, then add, each rounded to the accumulator type
// (float, or double for F64 rows), and one rounding to the row's type at the end. The sum starts with the first term, not
// with zero, so a single term of weight 1 returns its row bit for bit, -0.0 included. No terms: +0.
// weights: float (double for F64 rows), or null for a sum without weights.
//
// Example, F32, H = 2, weights {0.5, 2}: rows {2, 4} and {1, -1} -> {0.5 * 2 + 2 * 1, 0.5 * 4 + 2 * -1} = {3, 0}.
using WeightedSum = void (*)(void* out, const void* const* rows, const void* weights, int64_t terms, int64_t hidden);

struct RowKernels {
  const char* name;
  void (*copy)(char* to, const char* from, size_t bytes);
  // With stores that bypass the cache where the CPU has them. The caller runs fence() before it publishes anything.
  void (*copy_streaming)(char* to, const char* from, size_t bytes);
  void (*fence)();
  float (*half_to_float)(uint16_t value);
  WeightedSum weighted_sum[5];  // by Dtype
  QuantizeRow quantize[3][5];   // by Quant and Dtype; null where there is nothing to do
  Activate activate[5];         // by Dtype
  ActivateBackward activate_backward[5];
  AddBias add_bias[5];
  ScaleRows scale_rows[5];
  RowDots row_dots[5];
  ColumnSums column_sums[5];
  Convert convert[5][5];        // to, from
};

// The best one this CPU runs; MOE_A2A_CPU=portable in the environment takes the plain one.
const RowKernels& row_kernels();

const RowKernels& portable_row_kernels();
#if defined(__x86_64__)
const RowKernels& avx2_row_kernels();
#endif

}  // namespace moe_a2a
