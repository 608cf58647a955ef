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

  // What an expert's backward reads and writes. Rows are packed [count, H] in the rows' type, unless said otherwise; what isn't
  // wanted is null.
  struct Backward {
    const char* grads;     // of the results
    const char* weights;   // [count] of the rows, of type `weight_dtype`; null: 1
    Dtype weight_dtype;
    const char* rows;
    const char* hidden;    // what compute() kept; null: it is made again
    char* back;            // gradient of the rows, back_stride bytes apart
    int64_t back_stride;
    char* values;          // [count] gradient of the weights, in the accumulator's type
    char *up, *down, *up_bias, *down_bias;  // of this expert's parameters, in their type and layout, packed
  };
  // With g the gradient of the results, w the weights and a the activation's result: d = g @ down^T gives the weights' gradient
  // <d, a> + <g, down_bias> without the results themselves, and w d goes on backward.
  void backward(int64_t expert, int64_t count, const Backward& b);

 private:
  enum Buffer { FIRST, SECOND, ROWS, WIDE, BIAS, GRADS, SCALED, INNER, WEIGHTED, HIDDEN_GRAD, FACTORS, PARAMETER, BUFFERS };
  char* buffer(int index, int64_t count, int64_t width);
  // Rows [count, width] in the products' type.
  const char* as_compute(Buffer index, const char* rows, Dtype dtype, int64_t count, int64_t width);
  // [in, out] of the product; flipped [out, in].
  Tensor product_weight(int64_t expert, bool up, bool flipped = false);
  const char* bias_of(const std::optional<Tensor>& bias, int64_t expert, int64_t* step);
  // a^T @ b [a_width, b_width], or flipped, to a parameter's gradient.
  void outer(const char* a, int64_t a_width, const char* b, int64_t b_width, int64_t count, bool flipped, char* out);

  ExpertParameters p_;
  const int64_t hidden_;
  const Dtype rows_;
  int64_t width_, inner_;
  Dtype compute_;
  const RowKernels& kernels_;
  Block buffers_[BUFFERS];
};

// Are products of this type slower here than in float with the conversions that takes? Measured once in a process, with a wide
// margin, so that the answer doesn't hang on what else runs; MOE_A2A_GEMM=narrow or wide in the environment decides instead.
bool widen_products(Dtype dtype);

}  // namespace moe_a2a
