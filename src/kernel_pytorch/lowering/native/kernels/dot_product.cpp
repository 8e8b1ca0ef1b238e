// The kernel table of a target with instructions for products of bytes: that of the target itself, but for quantized
// linears. Compiled for AVX-512 VNNI, AVX-VNNI, and Arm's dot product and matrix multiplication of bytes.
#include "kernels/names.h"
#include "kernels/quantized_linear.h"
#include "kernels/table.h"

namespace kernel_pytorch {

const KernelTable* KP_CONCAT(kernels_for_, KP_TARGET_NAME)();

const KernelTable* KP_CONCAT(kernels_for_, KP_TABLE_NAME)() {
  static const KernelTable table = [] {
    KernelTable own = *KP_CONCAT(kernels_for_, KP_TARGET_NAME)();
    own.name = KP_STRING(KP_TABLE_NAME);
    own.quantized_linear = quantized_linear;
    return own;
  }();
  return &table;
}

}  // namespace kernel_pytorch
