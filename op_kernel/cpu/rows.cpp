#include "rows.h"

#include <cstdlib>
#include <cstring>

namespace moe_a2a {

const RowKernels& row_kernels() {
  static const RowKernels& chosen = []() -> const RowKernels& {
    const char* wish = std::getenv("MOE_A2A_CPU");
    if (wish != nullptr && std::strcmp(wish, "portable") == 0) return portable_row_kernels();
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return avx2_row_kernels();
#endif
    return portable_row_kernels();
  }();
  return chosen;
}

}  // namespace moe_a2a
