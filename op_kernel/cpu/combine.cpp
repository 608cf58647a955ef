#include "combine.h"

#include <cstring>

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

int64_t write_rows(const RowKernels& kernels, const RowsView& y, const int32_t* matrix, int64_t world_size,
                   int64_t num_experts, int64_t local_begin, int64_t local_end, int64_t source, char* to,
                   int64_t to_stride) {
  int64_t row = 0, bytes = 0;
  for (int64_t e = local_begin; e < local_end; ++e) {
    for (int64_t s = 0; s < world_size; ++s) {
      const int64_t count = matrix[s * num_experts + e];
      if (s == source && count > 0) {
        if (y.stride == y.row_bytes && to_stride == y.row_bytes) {
          kernels.copy(to + row * to_stride, y.data + row * y.stride, static_cast<size_t>(count * y.row_bytes));
        } else {
          for (int64_t i = row; i < row + count; ++i)
            kernels.copy(to + i * to_stride, y.data + i * y.stride, static_cast<size_t>(y.row_bytes));
        }
        bytes += count * y.row_bytes;
      }
      row += count;
    }
  }
  return bytes;
}

void sum_tokens(const RowKernels& kernels, Dtype dtype, int64_t tokens, int64_t top_k, int64_t hidden,
                const int32_t* expert, const int32_t* row, const int32_t* owner_of, const Owner* owners,
                const Weights& weights, const void** scratch_rows, double* scratch_weights, char* out) {
  const WeightedSum sum = kernels.weighted_sum[static_cast<int>(dtype)];
  const int64_t row_bytes = hidden * itemsize(dtype);
  auto* narrow = reinterpret_cast<float*>(scratch_weights);
  for (int64_t token = 0; token < tokens; ++token) {
    int64_t terms = 0;
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t pair = token * top_k + k;
      if (expert[pair] < 0) continue;  // its weight isn't read: it may be NaN
      const Owner& owner = owners[owner_of[expert[pair]]];
      scratch_rows[terms] = owner.y + row[pair] * owner.stride;
      if (weights.data != nullptr) {
        if (dtype == Dtype::F64) {
          scratch_weights[terms] = weight_as<double>(kernels, weights, token, k);
        } else {
          narrow[terms] = weight_as<float>(kernels, weights, token, k);
        }
      }
      ++terms;
    }
    sum(out + token * row_bytes, scratch_rows, weights.data != nullptr ? scratch_weights : nullptr, terms, hidden);
  }
}

}  // namespace moe_a2a
