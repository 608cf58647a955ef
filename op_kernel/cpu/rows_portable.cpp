// Rows in plain C++ with 16-byte compiler vectors: what runs on a CPU nobody wrote a special file for, aarch64 included.
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "rows.h"

#define VECTOR_BYTES 16

namespace moe_a2a {
namespace portable {
namespace half {

using F32V = float __attribute__((vector_size(VECTOR_BYTES)));

float load_one(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t exponent = (value >> 10) & 0x1fu;
  const uint32_t mantissa = value & 0x3ffu;
  uint32_t bits;
  if (exponent == 0x1f) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
  } else {
    // Subnormal: mantissa * 2^-24, exact in float.
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    __builtin_memcpy(&bits, &magnitude, sizeof bits);
    bits |= sign;
  }
  float wide;
  __builtin_memcpy(&wide, &bits, sizeof wide);
  return wide;
}

uint16_t store_one(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {
    // Below the smallest normal half, 2^-14: count in steps of 2^-24, ties to even.
    if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);  // below 2^-25
    const uint32_t exponent = magnitude >> 23;
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126u - exponent;  // 14..24
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t halfway = 1u << (shift - 1u);
    return static_cast<uint16_t>(sign | (kept + (rest > halfway || (rest == halfway && (kept & 1u) != 0))));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

F32V load(const uint16_t* at) {
  uint16_t halves[4];  // `at` may be any address
  __builtin_memcpy(halves, at, sizeof halves);
  F32V value;
  for (int lane = 0; lane < 4; ++lane) value[lane] = load_one(halves[lane]);
  return value;
}

void store(uint16_t* at, F32V value) {
  for (int lane = 0; lane < 4; ++lane) at[lane] = store_one(value[lane]);
}

}  // namespace half

#include "rows.inc"

#include "quantize.inc"

#include "activation.inc"

void copy(char* to, const char* from, size_t bytes) { std::memcpy(to, from, bytes); }
void fence() {}

}  // namespace portable

const RowKernels& portable_row_kernels() {
  static const RowKernels kernels{
      "portable",
      portable::copy,
      portable::copy,
      portable::fence,
      portable::half::load_one,
      {nullptr, portable::weighted_sum<portable::F32Rows>, portable::weighted_sum<portable::Bf16Rows>,
       portable::weighted_sum<portable::F16Rows>, portable::weighted_sum<portable::F64Rows>},
      {{},
       {nullptr, portable::to_int8<portable::F32Rows>, portable::to_int8<portable::Bf16Rows>,
        portable::to_int8<portable::F16Rows>, portable::to_int8<portable::F64AsF32Rows>},
       {nullptr, portable::to_fp8_e4m3<portable::F32Rows>, portable::to_fp8_e4m3<portable::Bf16Rows>,
        portable::to_fp8_e4m3<portable::F16Rows>, portable::to_fp8_e4m3<portable::F64AsF32Rows>}},
      {nullptr, portable::activate<portable::F32Rows>, portable::activate<portable::Bf16Rows>, portable::activate<portable::F16Rows>, portable::activate<portable::F64Rows>},
      {nullptr, portable::activate_backward<portable::F32Rows>, portable::activate_backward<portable::Bf16Rows>, portable::activate_backward<portable::F16Rows>, portable::activate_backward<portable::F64Rows>},
      {nullptr, portable::add_bias<portable::F32Rows>, portable::add_bias<portable::Bf16Rows>, portable::add_bias<portable::F16Rows>, portable::add_bias<portable::F64Rows>},
      {nullptr, portable::scale_rows<portable::F32Rows>, portable::scale_rows<portable::Bf16Rows>, portable::scale_rows<portable::F16Rows>, portable::scale_rows<portable::F64Rows>},
      {nullptr, portable::row_dots<portable::F32Rows>, portable::row_dots<portable::Bf16Rows>, portable::row_dots<portable::F16Rows>, portable::row_dots<portable::F64Rows>},
      {nullptr, portable::column_sums<portable::F32Rows>, portable::column_sums<portable::Bf16Rows>, portable::column_sums<portable::F16Rows>, portable::column_sums<portable::F64Rows>},
      {{},
       {nullptr, portable::convert<portable::F32Rows, portable::F32Rows>, portable::convert<portable::F32Rows, portable::Bf16Rows>, portable::convert<portable::F32Rows, portable::F16Rows>, portable::convert<portable::F32Rows, portable::F64Rows>},
       {nullptr, portable::convert<portable::Bf16Rows, portable::F32Rows>, portable::convert<portable::Bf16Rows, portable::Bf16Rows>, portable::convert<portable::Bf16Rows, portable::F16Rows>, portable::convert<portable::Bf16Rows, portable::F64Rows>},
       {nullptr, portable::convert<portable::F16Rows, portable::F32Rows>, portable::convert<portable::F16Rows, portable::Bf16Rows>, portable::convert<portable::F16Rows, portable::F16Rows>, portable::convert<portable::F16Rows, portable::F64Rows>},
       {nullptr, portable::convert<portable::F64Rows, portable::F32Rows>, portable::convert<portable::F64Rows, portable::Bf16Rows>, portable::convert<portable::F64Rows, portable::F16Rows>, portable::convert<portable::F64Rows, portable::F64Rows>}},
  };
  return kernels;
}

}  // namespace moe_a2a
