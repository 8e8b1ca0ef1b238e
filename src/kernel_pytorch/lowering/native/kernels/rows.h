// Conversion of rows between any dtype and stride in memory and contiguous float32, and reductions of float32 rows.
#pragma once

#include "core/types.h"
#include "kernels/simd.h"

namespace {

using kernel_pytorch::DType;
using kernel_pytorch::size_of;
using kernel_pytorch::View;

inline float half_at(const uint16_t* p, bool bfloat) {
  HalfVec one = {};
  one[0] = *p;
  return (bfloat ? from_bfloat16(one) : from_float16(one))[0];
}

// How a kernel reads one dtype: a vector of elements, or one element, as float32.
struct Float32 {
  using Element = float;
  static Vec vector(const float* p) { return load(p); }
  static float element(const float* p) { return *p; }
};

struct Float16 {
  using Element = uint16_t;
  static Vec vector(const uint16_t* p) { return from_float16(load_halves(p)); }
  static float element(const uint16_t* p) { return half_at(p, false); }
};

struct BFloat16 {
  using Element = uint16_t;
  static Vec vector(const uint16_t* p) { return from_bfloat16(load_halves(p)); }
  static float element(const uint16_t* p) { return half_at(p, true); }
};

struct Int8 {
  using Element = int8_t;
  static Vec vector(const int8_t* p) { return from_int8(p); }
  static float element(const int8_t* p) { return *p; }
};

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

inline int64_t row_length(const View& view) { return view.dims[view.rank - 1]; }

// The address of a row of a view, with rows counted over all dimensions but the last.
inline char* row_address(const View& view, int64_t row) {
  int64_t offset = 0;
  for (int d = view.rank - 2; d >= 0; --d) {
    offset += row % view.dims[d] * view.strides[d];
    row /= view.dims[d];
  }
  return view.data + offset * static_cast<int64_t>(size_of(view.dtype));
}

inline void read_row_of(const View& view, int64_t row, float* to) {
  read_row(to, row_address(view, row), view.dtype, view.strides[view.rank - 1], row_length(view));
}

inline void write_row_of(const View& view, int64_t row, const float* from) {
  write_row(row_address(view, row), from, view.dtype, view.strides[view.rank - 1], row_length(view));
}

inline float row_sum(const float* x, int64_t count) {
  Vec a = {}, b = {};
  int64_t n = 0;
  for (; n + 2 * kLanes <= count; n += 2 * kLanes) a += load(x + n), b += load(x + n + kLanes);
  float total = sum(a + b);
  for (; n < count; ++n) total += x[n];
  return total;
}

// NaN if the row has one, as in torch.
inline float row_max(const float* x, int64_t count) {
  float result = -__builtin_inff();
  int64_t n = 0;
  if (count >= kLanes) {
    Vec max = load(x);
    for (n = kLanes; n + kLanes <= count; n += kLanes) {
      const Vec own = load(x + n);
      max = select((own > max) | (own != own), own, max);
    }
    result = largest(max);
  }
  for (; n < count; ++n) result = x[n] > result || x[n] != x[n] ? x[n] : result;
  return result;
}

}  // namespace
