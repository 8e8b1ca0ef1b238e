// The kernel table of one instruction set: compiled once for each, with its flags and KP_TARGET_NAME.
#include "kernels/attention.h"
#include "kernels/attention_backward.h"
#include "kernels/cache.h"
#include "kernels/linear.h"
#include "kernels/names.h"
#include "kernels/norm.h"
#include "kernels/pointwise.h"
#include "kernels/quantized_linear.h"
#include "kernels/reduce.h"
#include "kernels/softmax.h"
#include "kernels/table.h"

namespace kernel_pytorch {

const KernelTable* KP_CONCAT(kernels_for_, KP_TARGET_NAME)() {
  static const KernelTable table = {
      KP_STRING(KP_TARGET_NAME),
      kTileRows,
      attention_scratch_bytes,
      attention,
      attention_backward_scratch_bytes,
      attention_backward,
      pointwise,
      norm,
      softmax,
      reduce,
      linear,
      cache_row,
      quantize_row,
      quantized_linear,
  };
  return &table;
}

}  // namespace kernel_pytorch
