#pragma once
#include <cstdint>
namespace moe_a2a {
enum class Quant : int32_t { NONE = 0, INT8 = 1, FP8_E4M3 = 2 };
constexpr int64_t QUANT_BLOCK = 128;
constexpr int64_t scales_per_row(Quant quant, int64_t hidden) {
  return quant == Quant::NONE ? 0 : quant == Quant::INT8 ? 1 : (hidden + QUANT_BLOCK - 1) / QUANT_BLOCK;
}
using QuantizeRow = void (*)(const void* row, int64_t hidden, uint8_t* q, float* scales);
}
