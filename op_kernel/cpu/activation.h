// What stands between an expert's two matrix products: the activation, gated or not.
//
// Gated: the first product has 2 I columns, gate and up, side by side (gate 0..I-1, up I..2I-1) or interleaved (gate in the even
// columns, up in the odd ones), and the result is act(gate) * up. Not gated: I columns and act of them.
// Computed in float (double for F64), one rounding at the end.
//
// Example, I = 2, RELU gated, side by side: {1, -1, 5, 7} -> {relu(1) * 5, relu(-1) * 7} = {5, 0}; interleaved, the same numbers
// are gate {1, 5}, up {-1, 7} -> {-1, 35}.
#pragma once

#include <cstdint>

#include "layout.h"

namespace moe_a2a {

enum class Activation : int32_t {
  SILU = 0,       // x / (1 + exp(-x))
  GELU = 1,       // x (1 + erf(x / sqrt 2)) / 2
  GELU_TANH = 2,  // x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
  RELU = 3,
  RELU2 = 4,      // relu(x)^2
  CLAMPED = 5,    // gated only, as gpt-oss has it: g = min(gate, limit), u = clamp(up, -limit, limit): g / (1 + exp(-alpha g)) (u + 1)
};
constexpr int ACTIVATIONS = 6;

struct ActivationSpec {
  Activation kind;
  bool gated;
  bool interleaved;
  double limit;  // CLAMPED
  double alpha;
};

// in [rows, W] packed, W = 2 I gated or I; out [rows, I] packed, may not be `in`.
using Activate = void (*)(const ActivationSpec& spec, const void* in, int64_t rows, int64_t inner, void* out);

// The same forward result in out, and in grad_in [rows, W] what grad_out [rows, I] becomes on its way back through it. Where the
// clamped activation cuts, the gradient is zero; on the limit itself it passes, as in torch.
//
// Example, RELU gated side by side, I = 1: in {2, 5}, grad_out {1} -> out {10}, grad_in {1 * 5, 1 * 2}.
using ActivateBackward = void (*)(const ActivationSpec& spec, const void* in, const void* grad_out, int64_t rows, int64_t inner,
                                  void* out, void* grad_in);

// out[i] = the element as another type: rows for products in a wider type than the rows have.
using Convert = void (*)(void* out, const void* in, int64_t count);

// For backward, in the accumulator's type (float, double for F64), packed rows.
// out[r][i] = in[r][i] * by[r].
using ScaleRows = void (*)(void* out, const void* in, const void* by, int64_t rows, int64_t width);
// out[r] += sum over i of a[r][i] * b[r * b_stride + i]; b_stride 0: the same row for all.
using RowDots = void (*)(void* out, const void* a, const void* b, int64_t b_stride, int64_t rows, int64_t width);
// out[i] = sum over r, in order, of in[r][i], rounded once.
using ColumnSums = void (*)(void* out, const void* in, int64_t rows, int64_t width);

// rows[r][i] += bias[i]; strides in elements.
using AddBias = void (*)(void* rows, int64_t count, int64_t width, int64_t stride, const void* bias, int64_t bias_stride);

}  // namespace moe_a2a
