// Rows of numbers between memory, in any format and stride, and float32.
#pragma once

#include "core/types.h"
#include "kernels/simd.h"

namespace {

using kernel_pytorch::DType;

inline float half_at(const uint16_t* p, bool bfloat) {
  HalfVec one = {};
  one[0] = *p;
  return (bfloat ? from_bfloat16(one) : from_float16(one))[0];
}

inline void read_row(float* to, const char* from, DType dtype, int64_t stride, int64_t count) {
  if (dtype == DType::kFloat32) {
    const float* p = reinterpret_cast<const float*>(from);
    if (stride == 1) {
      __builtin_memcpy(to, p, static_cast<size_t>(count) * sizeof(float));
    } else if (stride == 0) {
      for (int64_t n = 0; n < count; ++n) to[n] = *p;
    } else {
      for (int64_t n = 0; n < count; ++n) to[n] = p[n * stride];
    }
  } else if (dtype == DType::kInt8) {
    const int8_t* p = reinterpret_cast<const int8_t*>(from);
    int64_t n = 0;
    if (stride == 1) {
      for (; n + kLanes <= count; n += kLanes) store(to + n, from_int8(p + n));
    }
    for (; n < count; ++n) to[n] = p[n * stride];
  } else if (dtype == DType::kBool) {
    for (int64_t n = 0; n < count; ++n) to[n] = from[n * stride] ? 1.0f : 0.0f;
  } else {
    const bool bfloat = dtype == DType::kBFloat16;
    const uint16_t* p = reinterpret_cast<const uint16_t*>(from);
    int64_t n = 0;
    if (stride == 1) {
      for (; n + kLanes <= count; n += kLanes) {
        const HalfVec half = load_halves(p + n);
        store(to + n, bfloat ? from_bfloat16(half) : from_float16(half));
      }
    }
    for (; n < count; ++n) to[n] = half_at(p + n * stride, bfloat);
  }
}

inline void scale_row(float* row, float scale, int64_t count) {
  for (int64_t n = 0; n < count; ++n) row[n] *= scale;
}

inline void write_row(char* to, const float* from, DType dtype, int64_t stride, int64_t count) {
  if (dtype == DType::kFloat32) {
    float* p = reinterpret_cast<float*>(to);
    if (stride == 1) {
      __builtin_memcpy(p, from, static_cast<size_t>(count) * sizeof(float));
    } else {
      for (int64_t n = 0; n < count; ++n) p[n * stride] = from[n];
    }
    return;
  }
  const bool bfloat = dtype == DType::kBFloat16;
  uint16_t* p = reinterpret_cast<uint16_t*>(to);
  int64_t n = 0;
  if (stride == 1) {
    for (; n + kLanes <= count; n += kLanes) {
      const Vec v = load(from + n);
      store_halves(p + n, bfloat ? to_bfloat16(v) : to_float16(v));
    }
  }
  for (; n < count; ++n) {
    const Vec v = splat(from[n]);
    p[n * stride] = (bfloat ? to_bfloat16(v) : to_float16(v))[0];
  }
}

}  // namespace
