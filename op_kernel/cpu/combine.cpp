#include "combine.h"

#include <cstring>

#include "lines.h"

namespace moe_a2a {
namespace {

float widen_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// The weight in the accumulator's type.
template <class Acc>
Acc weight_as(const RowKernels& kernels, const Weights& weights, int64_t token, int64_t k) {
  const int64_t at = token * weights.token_stride + k * weights.k_stride;
  switch (weights.dtype) {
    case Dtype::F32: return static_cast<Acc>(static_cast<const float*>(weights.data)[at]);
    case Dtype::F64: return static_cast<Acc>(static_cast<const double*>(weights.data)[at]);
    case Dtype::BF16: return static_cast<Acc>(widen_bf16(static_cast<const uint16_t*>(weights.data)[at]));
    default: return static_cast<Acc>(kernels.half_to_float(static_cast<const uint16_t*>(weights.data)[at]));
  }
}

}  // namespace

int64_t copy_rows(const RowKernels& kernels, const RowsView& y, int64_t begin, int64_t count, char* to, int64_t to_stride,
                  bool streaming, uint64_t line_code) {
  if (count == 0) return 0;  // where there are no rows there may be no memory, and memcpy wants some
  const auto copy = streaming ? kernels.copy_streaming : kernels.copy;
  const char* from = y.data + begin * y.stride;
  if (line_code != 0) {
    for (int64_t i = 0; i < count; ++i) put_lines(to + i * to_stride, from + i * y.stride, y.row_bytes, line_code);
  } else if (y.stride == y.row_bytes && to_stride == y.row_bytes) {
    copy(to, from, static_cast<size_t>(count * y.row_bytes));
  } else {
    for (int64_t i = 0; i < count; ++i)
      copy(to + i * to_stride, from + i * y.stride, static_cast<size_t>(y.row_bytes));
  }
  at_point("y rows");
  return count * y.row_bytes;
}

void sum_tokens(const RowKernels& kernels, Dtype dtype, int64_t tokens, int64_t top_k, int64_t hidden, const int32_t* expert,
                const int32_t* slot, const Place* places, const Weights& weights, const SumScratch& scratch, char* out) {
  const WeightedSum sum = kernels.weighted_sum[static_cast<int>(dtype)];
  const int64_t row_bytes = hidden * itemsize(dtype);
  auto* narrow = reinterpret_cast<float*>(scratch.weights);
  for (int64_t token = 0; token < tokens; ++token) {
    int64_t terms = 0;
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t pair = token * top_k + k;
      if (expert[pair] < 0) continue;  // its weight isn't read: it may be NaN
      const Place& place = places[expert[pair]];
      const char* row = place.rows + slot[pair] * place.stride;
      if (place.lines) {
        get_lines(scratch.unlined + terms * row_bytes, row, 0, row_bytes);
        row = scratch.unlined + terms * row_bytes;
      }
      scratch.rows[terms] = row;
      if (weights.data != nullptr) {
        if (dtype == Dtype::F64) {
          scratch.weights[terms] = weight_as<double>(kernels, weights, token, k);
        } else {
          narrow[terms] = weight_as<float>(kernels, weights, token, k);
        }
      }
      ++terms;
    }
    sum(out + token * row_bytes, scratch.rows, weights.data != nullptr ? scratch.weights : nullptr, terms, hidden);
    at_point("sum");
  }
}

void take_pairs(const RowKernels& kernels, int64_t tokens, int64_t top_k, int64_t row_bytes, const int32_t* expert,
                const int32_t* slot, const Place* places, char* out) {
  for (int64_t pair = 0; pair < tokens * top_k; ++pair) {
    char* to = out + pair * row_bytes;
    if (expert[pair] < 0) {
      std::memset(to, 0, static_cast<size_t>(row_bytes));
      continue;
    }
    const Place& place = places[expert[pair]];
    const char* row = place.rows + slot[pair] * place.stride;
    if (place.lines) {
      get_lines(to, row, 0, row_bytes);
    } else {
      kernels.copy(to, row, static_cast<size_t>(row_bytes));
    }
  }
}

}  // namespace moe_a2a
