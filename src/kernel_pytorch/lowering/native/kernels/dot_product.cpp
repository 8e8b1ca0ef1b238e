// The kernel table of a target with dot-product instructions: that of the target itself, but for quantized linears.
#include "kernels/quantized_linear.h"
#include "kernels/table.h"

namespace kernel_pytorch {

#if defined(KP_TARGET_AVX512)
constexpr const char* kName = "avx512vnni";
const KernelTable* kernels_for_avx512();
static const KernelTable* base() { return kernels_for_avx512(); }
#else
constexpr const char* kName = "dotprod";
const KernelTable* kernels_for_baseline();
static const KernelTable* base() { return kernels_for_baseline(); }
#endif

const KernelTable* kernels_with_dot_product() {
  static const KernelTable table = [] {
    KernelTable own = *base();
    own.name = kName;
    own.quantized_linear = quantized_linear;
    return own;
  }();
  return &table;
}

}  // namespace kernel_pytorch
