#include "experts.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "../../op_kernel/cpu/wait.h"

namespace moe_a2a {
namespace {

// A tensor over memory that somebody else owns; strides in elements.
Tensor view_of(const void* data, Dtype dtype, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  const int64_t sizes[2] = {rows, columns}, strides[2] = {row_stride, column_stride};
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_create_tensor_from_blob(const_cast<void*>(data), 2, sizes, strides, 0,
                                                                   shim_dtype(scalar_type(dtype)), /*device_type=*/0, -1,
                                                                   &handle));
  return Tensor(handle);
}

void multiply(const Tensor& out, const Tensor& a, const Tensor& b) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(out.get(), a.get(), b.get()));
}

// Runs f(first row, how many) over rows of `width` elements, on torch's threads where there is enough for more than one. Rows
// don't depend on each other, so the results don't depend on how they are cut.
template <class F>
void for_rows(int64_t rows, int64_t width, const F& f) {
  constexpr int64_t enough = 1 << 14;  // elements for a thread
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, enough / std::max<int64_t>(1, width)),
                              [&](int64_t begin, int64_t end) { f(begin, end - begin); });
}

double seconds_for(Dtype dtype, int64_t rows, int64_t size) {
  std::vector<char> a(static_cast<size_t>(rows * size * 4)), b(static_cast<size_t>(size * size * 4)), c(a.size());
  const Tensor x = view_of(a.data(), dtype, rows, size, size, 1), w = view_of(b.data(), dtype, size, size, 1, size);
  const Tensor y = view_of(c.data(), dtype, rows, size, size, 1);
  int64_t best = INT64_MAX;
  for (int run = 0; run < 4; ++run) {
    const int64_t start = now_ns();
    multiply(y, x, w);
    best = std::min(best, now_ns() - start);
  }
  return static_cast<double>(best) * 1e-9;
}

}  // namespace

bool widen_products(Dtype dtype) {
  if (dtype != Dtype::BF16 && dtype != Dtype::F16) return false;
  static std::once_flag once[5];
  static bool wide[5];
  std::call_once(once[static_cast<int>(dtype)], [&] {
    // Read once, like the measurement: forward and backward must agree.
    const char* wish = std::getenv("MOE_A2A_GEMM");
    if (wish != nullptr && (std::strcmp(wish, "narrow") == 0 || std::strcmp(wish, "wide") == 0)) {
      wide[static_cast<int>(dtype)] = std::strcmp(wish, "wide") == 0;
      return;
    }
    constexpr int64_t rows = 128, size = 512;
    // A CPU without such products takes several times as long, one that has them half as long: nothing lies near 2.
    wide[static_cast<int>(dtype)] = seconds_for(dtype, rows, size) > 2 * seconds_for(Dtype::F32, rows, size);
  });
  return wide[static_cast<int>(dtype)];
}

std::string Experts::check(const ExpertParameters& p, int64_t local, int64_t hidden, Dtype rows, int64_t rank, bool* wrong_type) {
  const char* up_name = p.spec.gated ? "gate_up_proj" : "up_proj";
  const Dtype dtype = dtype_of(p.up);
  *wrong_type = true;
  if (static_cast<int>(p.spec.kind) < 0 || static_cast<int>(p.spec.kind) >= ACTIVATIONS)
    return say("%s: activation %d on rank %ld is unknown", MOE, static_cast<int>(p.spec.kind), rank);
  if (dtype == Dtype::NONE)
    return say("%s: %s has dtype %s on rank %ld; expected float32, bfloat16, float16 or float64", MOE, up_name,
               type_name(p.up).c_str(), rank);
  const auto same = [&](const char* name, const Tensor& tensor) -> std::string {
    if (dtype_of(tensor) == dtype) return {};
    return say("%s: %s has dtype %s on rank %ld, %s has %s; they must be the same", MOE, name, type_name(tensor).c_str(), rank,
               up_name, type_name(p.up).c_str());
  };
  std::string bad = same("down_proj", p.down);
  if (bad.empty() && p.up_bias.has_value()) bad = same("the first bias", *p.up_bias);
  if (bad.empty() && p.down_bias.has_value()) bad = same("down_bias", *p.down_bias);
  if (!bad.empty()) return bad;
  if (rows != dtype && !(itemsize(rows) == 2 && dtype == Dtype::F32))
    return say("%s: x has dtype %s on rank %ld and %s %s; expected the same, or x in a 16-bit type and float32 parameters", MOE,
               dtype_name(rows), rank, up_name, dtype_name(dtype));
  *wrong_type = false;
  const int h_axis = p.transposed ? 1 : 2, w_axis = p.transposed ? 2 : 1;
  if (p.up.dim() != 3 || p.up.size(0) != local || p.up.size(h_axis) != hidden)
    return say("%s: %s has shape %s on rank %ld; expected [%ld, %s] (experts of this rank, H = %ld of x)", MOE, up_name,
               shape(p.up).c_str(), rank, local, p.transposed ? "H, columns" : "columns, H", hidden);
  const int64_t width = p.up.size(w_axis), inner = p.spec.gated ? width / 2 : width;
  if (p.spec.gated && width % 2 != 0)
    return say("%s: %s has %ld columns on rank %ld; a gate and an up for each make an even number", MOE, up_name, width, rank);
  if (p.down.dim() != 3 || p.down.size(0) != local || p.down.size(p.transposed ? 1 : 2) != inner ||
      p.down.size(p.transposed ? 2 : 1) != hidden)
    return say("%s: down_proj has shape %s on rank %ld; expected [%ld, %ld, %ld], to go with %s %s", MOE, shape(p.down).c_str(), rank,
               local, p.transposed ? inner : hidden, p.transposed ? hidden : inner, up_name, shape(p.up).c_str());
  const auto bias = [&](const char* name, const std::optional<Tensor>& tensor, int64_t columns) -> std::string {
    if (!tensor.has_value() || (tensor->dim() == 2 && tensor->size(0) == local && tensor->size(1) == columns)) return {};
    return say("%s: %s has shape %s on rank %ld; expected [%ld, %ld]", MOE, name, shape(*tensor).c_str(), rank, local, columns);
  };
  bad = bias("the first bias", p.up_bias, width);
  if (bad.empty()) bad = bias("down_bias", p.down_bias, hidden);
  if (bad.empty() && p.spec.kind == Activation::CLAMPED && !p.spec.gated)
    bad = say("%s: the clamped activation has a gate; rank %ld asks for it without", MOE, rank);
  return bad;
}

Experts::Experts(const ExpertParameters& parameters, int64_t hidden, Dtype rows)
    : p_(parameters), hidden_(hidden), rows_(rows), kernels_(row_kernels()) {
  width_ = p_.up.size(p_.transposed ? 2 : 1);
  inner_ = p_.spec.gated ? width_ / 2 : width_;
  compute_ = widen_products(dtype_of(p_.up)) ? Dtype::F32 : dtype_of(p_.up);
}

char* Experts::buffer(int index, int64_t count, int64_t width) {
  const auto bytes = static_cast<size_t>(count * width * itemsize(compute_));
  Block& block = buffers_[index];
  if (block.bytes < bytes) {
    block = Block();  // first let go of the smaller one
    block = Block(bytes);
  }
  return static_cast<char*>(block.data);
}

// [H, W] or [I, H]: what rows are multiplied with, in the type of the products.
Tensor Experts::product_weight(int64_t expert, bool up, bool flipped) {
  const Tensor& all = up ? p_.up : p_.down;
  const Dtype dtype = dtype_of(all);
  const int64_t rows = all.size(1), columns = all.size(2);
  const char* data = static_cast<const char*>(all.const_data_ptr()) + expert * all.stride(0) * itemsize(dtype);
  int64_t row_stride = all.stride(1), column_stride = all.stride(2);
  if (dtype != compute_) {
    char* wide = buffer(WIDE, rows, columns);
    for (int64_t row = 0; row < rows; ++row) {
      const char* from = data + row * row_stride * itemsize(dtype);
      char* to = wide + row * columns * itemsize(compute_);
      if (column_stride == 1) {
        kernels_.convert[static_cast<int>(compute_)][static_cast<int>(dtype)](to, from, columns);
      } else {
        for (int64_t i = 0; i < columns; ++i)
          kernels_.convert[static_cast<int>(compute_)][static_cast<int>(dtype)](
              to + i * itemsize(compute_), from + i * column_stride * itemsize(dtype), 1);
      }
    }
    data = wide;
    row_stride = columns;
    column_stride = 1;
  }
  return p_.transposed != flipped ? view_of(data, compute_, rows, columns, row_stride, column_stride)
                                  : view_of(data, compute_, columns, rows, column_stride, row_stride);
}

const char* Experts::bias_of(const std::optional<Tensor>& bias, int64_t expert, int64_t* step) {
  if (!bias.has_value()) return nullptr;
  const Dtype dtype = dtype_of(*bias);
  const char* data = static_cast<const char*>(bias->const_data_ptr()) + expert * bias->stride(0) * itemsize(dtype);
  *step = bias->stride(1);
  if (dtype == compute_) return data;
  char* wide = buffer(BIAS, 1, bias->size(1));
  for (int64_t i = 0; i < bias->size(1); ++i)
    kernels_.convert[static_cast<int>(compute_)][static_cast<int>(dtype)](wide + i * itemsize(compute_),
                                                                          data + i * *step * itemsize(dtype), 1);
  *step = 1;
  return wide;
}

void Experts::compute(int64_t expert, char* rows, int64_t stride, int64_t count, char* kept) {
  const int from = static_cast<int>(rows_), to = static_cast<int>(compute_);
  const int64_t item = itemsize(rows_), elements = stride / item;
  // Rows of a type that isn't the products', or that don't start at whole elements, are moved to where they can be multiplied.
  const bool in_place = rows_ == compute_ && stride % item == 0;
  char* x = rows;
  if (!in_place) {
    x = buffer(ROWS, count, hidden_);
    for (int64_t row = 0; row < count; ++row)
      kernels_.convert[to][from](x + row * hidden_ * itemsize(compute_), rows + row * stride, hidden_);
  }
  int64_t step = 1;
  char* first = kept != nullptr ? kept : buffer(FIRST, count, width_);
  multiply(view_of(first, compute_, count, width_, width_, 1), view_of(x, compute_, count, hidden_, in_place ? elements : hidden_, 1),
           product_weight(expert, true));
  const char* bias = bias_of(p_.up_bias, expert, &step);
  if (bias != nullptr) kernels_.add_bias[to](first, count, width_, width_, bias, step);
  char* second = buffer(SECOND, count, inner_);
  for_rows(count, width_, [&](int64_t begin, int64_t rows) {
    kernels_.activate[to](p_.spec, first + begin * width_ * itemsize(compute_), rows, inner_,
                          second + begin * inner_ * itemsize(compute_));
  });
  multiply(view_of(x, compute_, count, hidden_, in_place ? elements : hidden_, 1), view_of(second, compute_, count, inner_, inner_, 1),
           product_weight(expert, false));
  if ((bias = bias_of(p_.down_bias, expert, &step)) != nullptr)
    kernels_.add_bias[to](x, count, hidden_, in_place ? elements : hidden_, bias, step);
  if (!in_place)
    for (int64_t row = 0; row < count; ++row)
      kernels_.convert[from][to](rows + row * stride, x + row * hidden_ * itemsize(compute_), hidden_);
}

const char* Experts::as_compute(Buffer index, const char* rows, Dtype dtype, int64_t count, int64_t width) {
  if (dtype == compute_) return rows;
  char* to = buffer(index, count, width);
  kernels_.convert[static_cast<int>(compute_)][static_cast<int>(dtype)](to, rows, count * width);
  return to;
}

void Experts::outer(const char* a, int64_t a_width, const char* b, int64_t b_width, int64_t count, bool flipped, char* out) {
  if (flipped) {
    std::swap(a, b);
    std::swap(a_width, b_width);
  }
  const Dtype dtype = dtype_of(p_.up);
  char* to = dtype == compute_ ? out : buffer(PARAMETER, a_width, b_width);
  multiply(view_of(to, compute_, a_width, b_width, b_width, 1), view_of(a, compute_, a_width, count, 1, a_width),
           view_of(b, compute_, count, b_width, b_width, 1));
  if (to != out) kernels_.convert[static_cast<int>(dtype)][static_cast<int>(compute_)](out, to, a_width * b_width);
}

void Experts::backward(int64_t expert, int64_t count, const Backward& b) {
  const int c = static_cast<int>(compute_);
  const Dtype wide = compute_ == Dtype::F64 ? Dtype::F64 : Dtype::F32, parameter = dtype_of(p_.up);
  const int64_t item = itemsize(compute_);
  const auto rows_of = [&](const char* data, int64_t width) { return view_of(data, compute_, count, width, width, 1); };
  int64_t step = 1;
  const char* x = as_compute(ROWS, b.rows, rows_, count, hidden_);
  const char* g = as_compute(GRADS, b.grads, rows_, count, hidden_);
  const char* h = b.hidden;
  if (h == nullptr) {
    char* made = buffer(FIRST, count, width_);
    multiply(rows_of(made, width_), rows_of(x, hidden_), product_weight(expert, true));
    if (const char* bias = bias_of(p_.up_bias, expert, &step)) kernels_.add_bias[c](made, count, width_, width_, bias, step);
    h = made;
  }
  char* d = buffer(INNER, count, inner_);
  multiply(rows_of(d, inner_), rows_of(g, hidden_), product_weight(expert, false, true));
  const char *weighted = d, *weighted_g = g;
  if (b.weights != nullptr) {
    char* factors = buffer(FACTORS, count, 2);  // of the accumulator's type, whatever the products' is
    kernels_.convert[static_cast<int>(wide)][static_cast<int>(b.weight_dtype)](factors, b.weights, count);
    char* to = buffer(WEIGHTED, count, inner_);
    for_rows(count, inner_, [&](int64_t begin, int64_t rows) {
      kernels_.scale_rows[c](to + begin * inner_ * item, d + begin * inner_ * item, factors + begin * itemsize(wide), rows, inner_);
    });
    weighted = to;
    if (b.down != nullptr || b.down_bias != nullptr) {
      char* scaled = buffer(SCALED, count, hidden_);
      for_rows(count, hidden_, [&](int64_t begin, int64_t rows) {
        kernels_.scale_rows[c](scaled + begin * hidden_ * item, g + begin * hidden_ * item, factors + begin * itemsize(wide), rows,
                               hidden_);
      });
      weighted_g = scaled;
    }
  }
  char *a = buffer(SECOND, count, inner_), *back_h = buffer(HIDDEN_GRAD, count, width_);
  for_rows(count, width_, [&](int64_t begin, int64_t rows) {
    kernels_.activate_backward[c](p_.spec, h + begin * width_ * item, weighted + begin * inner_ * item, rows, inner_,
                                  a + begin * inner_ * item, back_h + begin * width_ * item);
  });
  if (b.values != nullptr) {
    std::memset(b.values, 0, static_cast<size_t>(count * itemsize(wide)));
    for_rows(count, inner_, [&](int64_t begin, int64_t rows) {
      kernels_.row_dots[c](b.values + begin * itemsize(wide), d + begin * inner_ * item, a + begin * inner_ * item, inner_, rows,
                           inner_);
    });
    if (const char* bias = bias_of(p_.down_bias, expert, &step)) {
      std::vector<char> packed(static_cast<size_t>(hidden_ * item));
      for (int64_t i = 0; i < hidden_; ++i) std::memcpy(packed.data() + i * item, bias + i * step * item, static_cast<size_t>(item));
      kernels_.row_dots[c](b.values, g, packed.data(), 0, count, hidden_);
    }
  }
  if (b.down != nullptr) outer(weighted_g, hidden_, a, inner_, count, p_.transposed, b.down);
  if (b.up != nullptr) outer(back_h, width_, x, hidden_, count, p_.transposed, b.up);
  const auto sums = [&](const char* rows, int64_t width, char* out) {
    char* to = parameter == compute_ ? out : buffer(PARAMETER, 1, width);
    kernels_.column_sums[c](to, rows, count, width);
    if (to != out) kernels_.convert[static_cast<int>(parameter)][c](out, to, width);
  };
  if (b.down_bias != nullptr) sums(weighted_g, hidden_, b.down_bias);
  if (b.up_bias != nullptr) sums(back_h, width_, b.up_bias);
  const bool in_place = rows_ == compute_ && b.back_stride % item == 0;
  char* back = in_place ? b.back : buffer(ROWS, count, hidden_);  // x isn't needed any more
  multiply(view_of(back, compute_, count, hidden_, in_place ? b.back_stride / item : hidden_, 1), rows_of(back_h, width_),
           product_weight(expert, true, true));
  if (!in_place)
    for (int64_t row = 0; row < count; ++row)
      kernels_.convert[static_cast<int>(rows_)][c](b.back + row * b.back_stride, back + row * hidden_ * item, hidden_);
}

}  // namespace moe_a2a
