// Compiled once for each target, with that target's flags and KP_TARGET_NAME.
#include "kernels/attention.h"
#include "kernels/cache.h"
#include "kernels/linear.h"
#include "kernels/pointwise.h"
#include "kernels/row_ops.h"
#include "kernels/table.h"

#define KP_JOIN_AGAIN(a, b) a##b
#define KP_JOIN(a, b) KP_JOIN_AGAIN(a, b)
#define KP_TEXT_AGAIN(a) #a
#define KP_TEXT(a) KP_TEXT_AGAIN(a)

namespace kernel_pytorch {

const KernelTable* KP_JOIN(kernels_for_, KP_TARGET_NAME)() {
  static const KernelTable table = {
      KP_TEXT(KP_TARGET_NAME), kTileRows, attention_scratch_bytes, attention, pointwise, row_op, linear, unpack,
      cache_row,
  };
  return &table;
}

}  // namespace kernel_pytorch
