// One row into a key-value cache: as it is, in float16, or in int8 with a scale. kernel_pytorch/kv_cache.py defines it.
#pragma once

#include "kernels/rows.h"
#include "kernels/table.h"

namespace {

using kernel_pytorch::CacheRow;

inline void cache_row(const CacheRow& row, float* scratch) {
  read_row(scratch, row.from, row.from_dtype, row.stride, row.count);
  if (row.to_dtype != DType::kInt8) {
    write_row(row.to, scratch, row.to_dtype, 1, row.count);
    return;
  }
  float most = 0;
  for (int64_t n = 0; n < row.count; ++n) {
    const float a = __builtin_fabsf(scratch[n]);
    most = a > most || a != a ? a : most;
  }
  const float scale = most / 127.0f;
  *row.scale = scale;
  int8_t* const to = reinterpret_cast<int8_t*>(row.to);
  if (!(scale > 0) || !(scale < __builtin_inff())) {  // zeros; or a number that is not finite, which the scale keeps
    __builtin_memset(to, 0, static_cast<size_t>(row.count));
    return;
  }
  // Quotients, as the definition has them: products with 127 / most would round some numbers to their neighbours.
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  for (int64_t n = 0; n < row.count; ++n) to[n] = static_cast<int8_t>(scratch[n] / scale + magic - magic);
}

}  // namespace
