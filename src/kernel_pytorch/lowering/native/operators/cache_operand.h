// The cache that an op refers to by the first of its ints.
#pragma once

#include "core/operator.h"

namespace kernel_pytorch {

// The cache, or null if the op does not have exactly one valid index.
inline Cache* cache_operand(const Op& op, const LoadContext& context) {
  const bool good = op.ints.size() == 1 && op.ints[0] >= 0 && static_cast<size_t>(op.ints[0]) < context.caches.size();
  return good ? context.caches[static_cast<size_t>(op.ints[0])].get() : nullptr;
}

}  // namespace kernel_pytorch
