// What a rank's experts compute, on torch's matrix products.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "../../op_kernel/cpu/activation.h"
#include "../../op_kernel/cpu/rows.h"
#include "group.h"
#include "pool.h"
#include "tensors.h"

namespace moe_a2a {

// The parameters of a rank's experts, and what to do with them. I inner, W = 2 I gated or I.
struct ExpertParameters {
  Tensor up;                       // [E_local, W, H], transposed [E_local, H, W]
  Tensor down;                     // [E_local, H, I], transposed [E_local, I, H]
  std::optional<Tensor> up_bias;   // [E_local, W]
  std::optional<Tensor> down_bias; // [E_local, H]
  bool transposed = false;
  ActivationSpec spec{};
};

// Memory of the output pool.
struct Block {
  Block() = default;
  explicit Block(size_t bytes) : data(pool_take(bytes)), bytes(bytes) {}
  Block(const Block&) = delete;
  Block& operator=(Block&& other) noexcept {
    std::swap(data, other.data);
    std::swap(bytes, other.bytes);
    return *this;
  }
  ~Block() {
    if (data != nullptr) pool_give(data);
  }
  void* data = nullptr;
  size_t bytes = 0;
};

// Computes experts one at a time; its buffers are as large as the largest needs.
class Experts {
 public:
  // bad: why these can't be the experts of `local` experts and rows of `hidden` elements of type `rows`; "" when they can.
  static std::string check(const ExpertParameters& parameters, int64_t local, int64_t hidden, Dtype rows, int64_t rank,
                           bool* wrong_type);

  Experts(const ExpertParameters& parameters, int64_t hidden, Dtype rows);

  int64_t width() const { return width_; }
  // The type in which the products are made, and what `kept` has.
  Dtype compute_dtype() const { return compute_; }

  // rows [count, hidden], `stride` bytes apart, become their results in place. kept: null, or where the first product [count, W] with
  // its bias goes, for backward.
  void compute(int64_t expert, char* rows, int64_t stride, int64_t count, char* kept);

 private:
  char* buffer(int index, int64_t count, int64_t width);
  Tensor product_weight(int64_t expert, bool up);

  ExpertParameters p_;
  const int64_t hidden_;
  const Dtype rows_;
  int64_t width_, inner_;
  Dtype compute_;
  const RowKernels& kernels_;
  Block buffers_[5];
};

// Are products of this type slower here than in float with the conversions that takes? Measured once in a process, with a wide
// margin, so that the answer doesn't hang on what else runs; MOE_A2A_GEMM=narrow or wide in the environment decides instead.
bool widen_products(Dtype dtype);

}  // namespace moe_a2a
