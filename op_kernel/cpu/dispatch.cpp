#include "dispatch.h"

#include <cstring>
#include <vector>

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

int64_t quantize_rows(QuantizeRow quantize, const RowsView& x, int64_t hidden, const int32_t* expert, int64_t top_k,
                      const Wire& wire, char* to, int64_t to_stride) {
  int64_t bytes = 0;
  std::vector<float> scales(static_cast<size_t>(wire.scale_bytes / 4));
  for (int64_t token = 0; token < x.rows; ++token) {
    bool travels = false;
    for (int64_t k = 0; k < top_k; ++k) travels |= expert[token * top_k + k] >= 0;
    if (!travels) continue;
    char* row = to + token * to_stride;
    quantize(x.data + token * x.stride, hidden, reinterpret_cast<uint8_t*>(row), scales.data());
    std::memcpy(row + wire.scale_offset, scales.data(), static_cast<size_t>(wire.scale_bytes));
    bytes += wire.pull_bytes;
  }
  return bytes;
}

Gathered gather_rows(const RowKernels& kernels, const int32_t* matrix, int64_t world_size, int64_t num_experts,
                     int64_t local_begin, int64_t local_end, const int32_t* offsets, const Source* sources, const Wire& wire,
                     bool streaming, const Received& out) {
  const auto copy = streaming ? kernels.copy_streaming : kernels.copy;
  const auto row_bytes = static_cast<size_t>(wire.data_bytes);
  int64_t bytes = 0;
  // Where each source's list stands: its pairs of earlier experts come first.
  std::vector<int64_t> many;
  int64_t few[64];
  if (world_size > 64) many.resize(static_cast<size_t>(world_size));
  int64_t* at = world_size > 64 ? many.data() : few;
  for (int64_t s = 0; s < world_size; ++s) {
    at[s] = 0;
    for (int64_t e = 0; e < local_begin; ++e) at[s] += matrix[s * num_experts + e];
  }
  for (int64_t e = local_begin; e < local_end; ++e) {
    int64_t row = offsets[e - local_begin];
    for (int64_t s = 0; s < world_size; ++s) {
      const int64_t count = matrix[s * num_experts + e];
      const Source& source = sources[s];
      if (source.x != nullptr) {
        for (int64_t i = 0; i < count; ++i) {
          // Another process wrote it.
          const int64_t token = source.list[at[s] + i];
          if (static_cast<uint64_t>(token) >= static_cast<uint64_t>(source.tokens)) return {bytes, s};
          const char* from = source.x + token * source.stride;
          copy(out.rows + (row + i) * wire.data_bytes, from, row_bytes);
          if (wire.scale_bytes != 0)
            std::memcpy(out.scales + (row + i) * wire.scale_bytes, from + wire.scale_offset,
                        static_cast<size_t>(wire.scale_bytes));
        }
        at_point("gather");
        if (wire.weight_bytes != 0)
          std::memcpy(out.weights + row * wire.weight_bytes, source.weight_list + at[s] * wire.weight_bytes,
                      static_cast<size_t>(count * wire.weight_bytes));
        bytes += count * (wire.data_bytes + wire.scale_bytes);
      }
      at[s] += count;
      row += count;
    }
  }
  if (streaming) kernels.fence();
  return {bytes, -1};
}

void zero_padding(const int64_t* counts, const int32_t* offsets, int64_t local_experts, int64_t out_rows, const Wire& wire,
                  const Received& out) {
  const auto zero = [&](int64_t begin, int64_t end) {
    const auto rows = static_cast<size_t>(end - begin);
    if (rows == 0) return;
    std::memset(out.rows + begin * wire.data_bytes, 0, rows * static_cast<size_t>(wire.data_bytes));
    if (wire.weight_bytes != 0)
      std::memset(out.weights + begin * wire.weight_bytes, 0, rows * static_cast<size_t>(wire.weight_bytes));
    if (wire.scale_bytes != 0)
      std::memset(out.scales + begin * wire.scale_bytes, 0, rows * static_cast<size_t>(wire.scale_bytes));
  };
  for (int64_t e = 0; e < local_experts; ++e) zero(offsets[e] + counts[e], offsets[e + 1]);
  zero(offsets[local_experts], out_rows);
}

void row_bases(const int32_t* matrix, int64_t world_size, int64_t num_experts, int64_t rank, int64_t align, int32_t* base,
               int64_t* totals) {
  for (int64_t owner = 0; owner < world_size; ++owner) {
    int64_t row = 0;
    const int64_t end = first_expert(owner + 1, num_experts, world_size);
    for (int64_t e = first_expert(owner, num_experts, world_size); e < end; ++e) {
      for (int64_t s = 0; s < world_size; ++s) {
        if (s == rank) base[e] = static_cast<int32_t>(row);  // checked against 2**31 by whoever uses it
        row += matrix[s * num_experts + e];
      }
      if (align > 1) row = align_up(row, align);
    }
    totals[owner] = row;
  }
}

namespace {

uint64_t add_to_digest(uint64_t sum, const int32_t* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    sum = (sum ^ static_cast<uint32_t>(values[i])) * 0xff51afd7ed558ccdu;
    sum ^= sum >> 32;
  }
  return sum;
}

constexpr uint64_t DIGEST_START = 0x9e3779b97f4a7c15u;

}  // namespace

int64_t digest(const int32_t* matrix, int64_t count) {
  const uint64_t sum = add_to_digest(DIGEST_START, matrix, count);
  return sum == 0 ? 1 : static_cast<int64_t>(sum);
}

int64_t routing_digest(const int32_t* matrix, int64_t count, uint64_t epoch) {
  int32_t number[2];
  put64(number, 0, static_cast<int64_t>(epoch));
  const uint64_t sum = add_to_digest(add_to_digest(DIGEST_START, matrix, count), number, 2);
  return sum == 0 ? 1 : static_cast<int64_t>(sum);
}

}  // namespace moe_a2a
