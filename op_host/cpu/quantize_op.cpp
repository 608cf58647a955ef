// moe_a2a::quantize_rows: checks the tensor, allocates q and scales, and runs the kernel row by row. Local: no group.
#include <optional>
#include <string>
#include <tuple>

#include "../../op_kernel/cpu/rows.h"
#include "tensors.h"

namespace moe_a2a {
namespace {

constexpr const char* QUANTIZE_ROWS = "moe_a2a.quantize_rows";

Quant quant_of(const std::string& name) {
  if (name == "int8") return Quant::INT8;
  if (name == "fp8_e4m3") return Quant::FP8_E4M3;
  throw Failure(FailureKind::BAD_VALUE,
                say("%s: quantize = \"%s\"; expected \"int8\" or \"fp8_e4m3\"", QUANTIZE_ROWS, name.c_str()));
}

std::tuple<Tensor, Tensor> quantize_rows(Tensor x, std::string quantize) {
  return guarded([&] {
    const Quant quant = quant_of(quantize);
    const Dtype dtype = dtype_of(x);
    if (dtype == Dtype::NONE)
      throw Failure(FailureKind::BAD_TYPE, say("%s: x has dtype %s; expected float32, bfloat16, float16 or float64",
                                               QUANTIZE_ROWS, type_name(x).c_str()));
    if (x.dim() != 2 || x.size(1) < 1)
      throw Failure(FailureKind::BAD_VALUE,
                    say("%s: x has shape %s; expected [T, H] with H >= 1", QUANTIZE_ROWS, shape(x).c_str()));
    const int64_t tokens = x.size(0), hidden = x.size(1), per_row = scales_per_row(quant, hidden);
    std::string bad;
    const Tensor rows = with_packed_columns(QUANTIZE_ROWS, "x", x, -1, &bad);
    if (!bad.empty()) throw Failure(FailureKind::OUT_OF_MEMORY, bad);
    Tensor q = new_output({tokens, hidden}, quant == Quant::INT8 ? ScalarType::Char : ScalarType::Float8_e4m3fn, 1);
    Tensor scales = quant == Quant::INT8 ? new_output({tokens}, ScalarType::Float, 4)
                                         : new_output({tokens, per_row}, ScalarType::Float, 4);
    const QuantizeRow run = row_kernels().quantize[static_cast<int>(quant)][static_cast<int>(dtype)];
    const auto* from = static_cast<const char*>(rows.const_data_ptr());
    const int64_t stride = rows.stride(0) * itemsize(dtype);
    auto* to = static_cast<uint8_t*>(q.mutable_data_ptr());
    auto* scale = static_cast<float*>(scales.mutable_data_ptr());
    for (int64_t t = 0; t < tokens; ++t) run(from + t * stride, hidden, to + t * hidden, scale + t * per_row);
    return std::make_tuple(q, scales);
  });
}

}  // namespace
}  // namespace moe_a2a

STABLE_TORCH_LIBRARY_IMPL(moe_a2a, CPU, m) { m.impl("quantize_rows", TORCH_BOX(&moe_a2a::quantize_rows)); }
