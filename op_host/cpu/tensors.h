// Tensors by the LibTorch stable ABI, for every file that implements operators: what they are, new ones, and failures.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cctype>
#include <initializer_list>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>

#include "../../op_kernel/cpu/layout.h"
#include "failure.h"
#include "pool.h"

// Only in torch 2.11 and newer; on 2.10 it is null and outputs come from torch's own allocator.
extern "C" __attribute__((weak)) AOTITorchError torch_from_blob(void* data, int64_t ndim, const int64_t* sizes,
                                                                const int64_t* strides, int64_t storage_offset, int32_t dtype,
                                                                int32_t device_type, int32_t device_index,
                                                                AtenTensorHandle* ret, int32_t layout,
                                                                const uint8_t* opaque_metadata, int64_t opaque_metadata_size,
                                                                void (*deleter)(void* data, void* context), void* context);

namespace moe_a2a {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

extern thread_local std::optional<Failure> last_failure;  // defined in bindings.cpp, read by module.cpp

inline Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Dtype::F32;
    case ScalarType::BFloat16: return Dtype::BF16;
    case ScalarType::Half: return Dtype::F16;
    case ScalarType::Double: return Dtype::F64;
    default: return Dtype::NONE;
  }
}

inline ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::F32: return ScalarType::Float;
    case Dtype::BF16: return ScalarType::BFloat16;
    case Dtype::F16: return ScalarType::Half;
    default: return ScalarType::Double;
  }
}

inline int32_t shim_dtype(ScalarType type) { return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)); }

inline std::string shape(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(tensor.size(i));
  return text + "]";
}

// The dtype as Python names it.
inline std::string type_name(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Half: return "float16";
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: break;
  }
  // The others (bool, bfloat16, float8_e4m3fn, uint16 ...) differ in capitals only.
  std::string name = torch::headeronly::toString(tensor.scalar_type());
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name;
}

// A tensor over memory that `deleter(data, context)` gives back.
inline Tensor wrap(void* data, int64_t dims, const int64_t* sizes, const int64_t* strides, ScalarType type,
                   void (*deleter)(void*, void*), void* context) {
  AtenTensorHandle handle;
  // Device index -1: on the CPU 0 is refused.
  STABLE_TORCH_ERROR_CODE_CHECK(torch_from_blob(data, dims, sizes, strides, 0, shim_dtype(type), /*device_type=*/0, -1,
                                                &handle, /*layout=*/0, nullptr, 0, deleter, context));
  return Tensor(handle);
}

inline Tensor new_output(std::initializer_list<int64_t> sizes, ScalarType type, int64_t bytes_per_item) {
  int64_t strides[3] = {1, 1, 1};
  int64_t bytes = bytes_per_item;
  for (int64_t size : sizes)
    if (__builtin_mul_overflow(bytes, size, &bytes)) throw std::bad_alloc();
  for (auto i = static_cast<int64_t>(sizes.size()) - 2; i >= 0; --i)
    strides[i] = strides[i + 1] * std::max<int64_t>(*(sizes.begin() + i + 1), 1);
  if (torch_from_blob == nullptr)
    return torch::stable::empty(torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()), type);
  void* block = pool_take(static_cast<size_t>(bytes));
  try {
    return wrap(block, static_cast<int64_t>(sizes.size()), sizes.begin(), strides, type,
                [](void* data, void*) { pool_give(data); }, nullptr);
  } catch (...) {
    pool_give(block);
    throw;
  }
}

// Runs an operation; a Failure is kept for the Python function, which raises its named type, and thrown on as a RuntimeError
// with the same sentence for those who call torch.ops themselves.
template <class Operation>
auto guarded(Operation operation) -> decltype(operation()) {
  last_failure.reset();
  try {
    return operation();
  } catch (const Failure& failure) {
    last_failure = failure;
    throw std::runtime_error(failure.what());
  } catch (const std::bad_alloc&) {
    last_failure = Failure(FailureKind::OUT_OF_MEMORY, "moe_a2a: no memory on this rank for what the call needs, such as its output. Free some, or send fewer tokens at once");
    throw std::runtime_error(last_failure->what());
  }
}

// " on rank R", for messages; -1: the operation is local.
inline std::string on(int64_t rank) { return rank < 0 ? "" : " on rank " + std::to_string(rank); }

// The tensor, or a copy whose columns lie side by side. `bad` says why there is none.
inline Tensor with_packed_columns(const char* operation, const char* name, const Tensor& tensor, int64_t rank,
                                  std::string* bad) {
  if (tensor.dim() != 2 || tensor.size(1) <= 1 || tensor.stride(1) == 1) return tensor;
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::exception&) {
    *bad = say("%s: no memory%s for a copy of %s %s whose columns lie side by side", operation, on(rank).c_str(), name,
               shape(tensor).c_str());
    return tensor;
  }
}

}  // namespace moe_a2a
