// Rows in one byte a value: the two quantised wire formats.
//
// All arithmetic is float32, rounded to nearest even: bf16 and fp16 values widen exactly, a float64 value is rounded to
// float32 first (one that overflows counts as infinite). A part of a row, the whole row (INT8) or 128 columns (FP8_E4M3;
// the last part of a row may be narrower), has one float32 scale:
//
//   amax = max |x| over the part
//   NaN or +-Inf in the part       scale = NaN (bits 0x7fc00000), every q = 0: a broken row dequantises to NaN everywhere
//   scale = amax / LARGEST         one division; LARGEST is 127 (INT8), 448 (FP8_E4M3)
//   scale == 0 (zeros, underflow)  scale = +0, every q = 0 (+0)
//   q = encode(clamp(x / scale, -LARGEST, LARGEST))
//                                  one division; INT8: nearest integer, ties to even; FP8_E4M3: nearest e4m3fn value, ties
//                                  to even, subnormals included, a zero keeps its sign
//   dequantised = float32(q) * scale
//
// Example, INT8: {2, -1, 0.5, 0}: amax = 2, scale = 2 / 127 = 0.015748, x / scale = {127, -63.5, 31.75, 0} (63.5 is a tie),
//   q = {127, -64, 32, 0}, dequantised {2, -1.0079, 0.5039, 0}.
// Example, FP8_E4M3: the same row: scale = 2 / 448 = 0.0044643, x / scale = {448, -224, 112, 0}, all of them e4m3fn values:
//   q = {0x7e, 0xf6, 0x6e, 0x00}, dequantised {2, -1, 0.5, 0} (to float32's rounding).
//
// A scale that is subnormal (amax below LARGEST * 2^-126) has lost bits, so the largest values may be off by another
// LARGEST * 2^-150. In a thread that flushes denormals to zero a subnormal float32 counts as zero, as x and as scale, so such
// parts are zero; the rest is as ever.
#pragma once

#include <cstdint>

namespace moe_a2a {

enum class Quant : int32_t { NONE = 0, INT8 = 1, FP8_E4M3 = 2 };

constexpr int64_t QUANT_BLOCK = 128;  // columns that share a scale in FP8_E4M3

constexpr int64_t scales_per_row(Quant quant, int64_t hidden) {
  return quant == Quant::NONE ? 0 : quant == Quant::INT8 ? 1 : (hidden + QUANT_BLOCK - 1) / QUANT_BLOCK;
}

// Writes hidden bytes to q and scales_per_row floats to scales. row and q may have any address, scales is aligned as floats
// are. q and scales don't overlap row.
using QuantizeRow = void (*)(const void* row, int64_t hidden, uint8_t* q, float* scales);

}  // namespace moe_a2a
