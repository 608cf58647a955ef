// Rows with AVX2 and F16C. The file is compiled with these instruction sets switched on by pragma, so the rest of the
// library runs on any x86-64; rows.cpp calls in here only after it has asked the CPU.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "rows.h"

#pragma GCC push_options
#pragma GCC target("avx2,f16c")

#define VECTOR_BYTES 32

namespace moe_a2a {
namespace avx2 {
namespace half {

using F32V = float __attribute__((vector_size(VECTOR_BYTES)));

inline F32V load(const uint16_t* at) {
  return reinterpret_cast<F32V>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
inline void store(uint16_t* at, F32V value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
}
inline float load_one(uint16_t value) { return _cvtsh_ss(value); }
inline uint16_t store_one(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

}  // namespace half

#include "rows.inc"

#include "quantize.inc"

#include "activation.inc"

void copy(char* to, const char* from, size_t bytes) { std::memcpy(to, from, bytes); }

void copy_streaming(char* to, const char* from, size_t bytes) {
  const size_t head = (32 - reinterpret_cast<uintptr_t>(to) % 32) % 32;
  if (bytes < head + 128) return copy(to, from, bytes);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + 128 <= bytes; at += 128) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 32));
    const __m256i c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 64));
    const __m256i d = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 96));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + 32), b);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + 64), c);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + 96), d);
  }
  std::memcpy(to + at, from + at, bytes - at);
}

void fence() { _mm_sfence(); }

}  // namespace avx2

const RowKernels& avx2_row_kernels() {
  static const RowKernels kernels{
      "avx2",
      avx2::copy,
      avx2::copy_streaming,
      avx2::fence,
      avx2::half::load_one,
      {nullptr, avx2::weighted_sum<avx2::F32Rows>, avx2::weighted_sum<avx2::Bf16Rows>,
       avx2::weighted_sum<avx2::F16Rows>, avx2::weighted_sum<avx2::F64Rows>},
      {{},
       {nullptr, avx2::to_int8<avx2::F32Rows>, avx2::to_int8<avx2::Bf16Rows>,
        avx2::to_int8<avx2::F16Rows>, avx2::to_int8<avx2::F64AsF32Rows>},
       {nullptr, avx2::to_fp8_e4m3<avx2::F32Rows>, avx2::to_fp8_e4m3<avx2::Bf16Rows>,
        avx2::to_fp8_e4m3<avx2::F16Rows>, avx2::to_fp8_e4m3<avx2::F64AsF32Rows>}},
      {nullptr, avx2::activate<avx2::F32Rows>, avx2::activate<avx2::Bf16Rows>, avx2::activate<avx2::F16Rows>, avx2::activate<avx2::F64Rows>},
      {nullptr, avx2::activate_backward<avx2::F32Rows>, avx2::activate_backward<avx2::Bf16Rows>, avx2::activate_backward<avx2::F16Rows>, avx2::activate_backward<avx2::F64Rows>},
      {nullptr, avx2::add_bias<avx2::F32Rows>, avx2::add_bias<avx2::Bf16Rows>, avx2::add_bias<avx2::F16Rows>, avx2::add_bias<avx2::F64Rows>},
      {nullptr, avx2::scale_rows<avx2::F32Rows>, avx2::scale_rows<avx2::Bf16Rows>, avx2::scale_rows<avx2::F16Rows>, avx2::scale_rows<avx2::F64Rows>},
      {nullptr, avx2::row_dots<avx2::F32Rows>, avx2::row_dots<avx2::Bf16Rows>, avx2::row_dots<avx2::F16Rows>, avx2::row_dots<avx2::F64Rows>},
      {nullptr, avx2::column_sums<avx2::F32Rows>, avx2::column_sums<avx2::Bf16Rows>, avx2::column_sums<avx2::F16Rows>, avx2::column_sums<avx2::F64Rows>},
      {{},
       {nullptr, avx2::convert<avx2::F32Rows, avx2::F32Rows>, avx2::convert<avx2::F32Rows, avx2::Bf16Rows>, avx2::convert<avx2::F32Rows, avx2::F16Rows>, avx2::convert<avx2::F32Rows, avx2::F64Rows>},
       {nullptr, avx2::convert<avx2::Bf16Rows, avx2::F32Rows>, avx2::convert<avx2::Bf16Rows, avx2::Bf16Rows>, avx2::convert<avx2::Bf16Rows, avx2::F16Rows>, avx2::convert<avx2::Bf16Rows, avx2::F64Rows>},
       {nullptr, avx2::convert<avx2::F16Rows, avx2::F32Rows>, avx2::convert<avx2::F16Rows, avx2::Bf16Rows>, avx2::convert<avx2::F16Rows, avx2::F16Rows>, avx2::convert<avx2::F16Rows, avx2::F64Rows>},
       {nullptr, avx2::convert<avx2::F64Rows, avx2::F32Rows>, avx2::convert<avx2::F64Rows, avx2::Bf16Rows>, avx2::convert<avx2::F64Rows, avx2::F16Rows>, avx2::convert<avx2::F64Rows, avx2::F64Rows>}},
  };
  return kernels;
}

}  // namespace moe_a2a

#pragma GCC pop_options

#endif
