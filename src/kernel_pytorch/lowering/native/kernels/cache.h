// Writes one row to a key-value cache in float32, float16, or int8 with a scale, as kernel_pytorch/kv_cache.py defines.
#pragma once

#include "kernels/table.h"
#include "kernels/whole_rows.h"

namespace {

using kernel_pytorch::CacheRow;

inline void cache_row(const CacheRow& row, float* scratch) {
  read_whole_row(scratch, row.from, row.from_dtype, row.stride, row.count);
  if (row.to_dtype != DType::kInt8) {
    write_whole_row(row.to, scratch, row.to_dtype, 1, row.count);
    return;
  }
  float amax = 0;
  for (int64_t n = 0; n < row.count; ++n) {
    const float a = __builtin_fabsf(scratch[n]);
    amax = a > amax || a != a ? a : amax;
  }
  const float scale = amax / 127.0f;
  *row.scale = scale;
  int8_t* const to = reinterpret_cast<int8_t*>(row.to);
  if (!(scale > 0) || !(scale < __builtin_inff())) {  // all zero, or not finite: the scale keeps that
    __builtin_memset(to, 0, static_cast<size_t>(row.count));
    return;
  }
  // Divide, as the definition does: multiplying by 127 / amax would round some elements differently.
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t n = 0; n < row.count; ++n) to[n] = static_cast<int8_t>(scratch[n] / scale + magic - magic);
}

}  // namespace
