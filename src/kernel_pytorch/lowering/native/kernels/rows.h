// Conversion of rows between any dtype and stride in memory and contiguous float32, and reductions of float32 rows.
#pragma once

#include "core/types.h"
#include "kernels/simd.h"

// For functions that read a whole row: their switch over dtypes is large, and there is a copy for each instruction set.
#define KP_NOT_INLINED __attribute__((noinline)) inline

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

inline void read_elements(float* to, const char* from, DType dtype, int64_t stride, int64_t count) {
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

KP_NOT_INLINED void read_row(float* to, const char* from, DType dtype, int64_t stride, int64_t count) {
  read_elements(to, from, dtype, stride, count);
}

typedef float Quad __attribute__((vector_size(16)));
typedef float UnalignedQuad __attribute__((vector_size(16), aligned(4), may_alias));

// Four rows of four elements from four columns.
inline void transpose_quads(float* to, int64_t width, const float* from, int64_t stride) {
  Quad in[4];
  for (int n = 0; n < 4; ++n) in[n] = *reinterpret_cast<const UnalignedQuad*>(from + n * stride);
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  const Quad a = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5),
             b = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
  const Quad c = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7),
             d = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
  const Quad out[4] = {__builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
                       __builtin_shufflevector(c, d, 0, 1, 4, 5), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
#else
  Quad out[4];
  for (int n = 0; n < 4; ++n) out[n] = Quad{in[0][n], in[1][n], in[2][n], in[3][n]};
#endif
  for (int n = 0; n < 4; ++n) *reinterpret_cast<UnalignedQuad*>(to + n * width) = out[n];
}

constexpr int64_t kMostTransposedRows = 16;

// Reads columns whose elements are contiguous, and which lie `stride` elements apart, into rows of `to` that lie
// `width` elements apart.
inline void read_transposed(float* to, int64_t width, const char* from, DType dtype, int64_t stride, int64_t rows,
                            int64_t columns) {
  constexpr int64_t kAhead = 16;
  const int64_t bytes = stride * static_cast<int64_t>(size_of(dtype));
  float column[kMostTransposedRows];
  int64_t c = 0;
  if (dtype == DType::kFloat32 && rows % 4 == 0) {
    for (; c + 4 <= columns; c += 4) {
      const float* const own = reinterpret_cast<const float*>(from + c * bytes);
      for (int64_t n = 0; n < 4; ++n) __builtin_prefetch(own + (kAhead + n) * stride);
      for (int64_t r = 0; r < rows; r += 4) transpose_quads(to + r * width + c, width, own + r, stride);
    }
  }
  for (; c < columns; ++c) {
    read_row(column, from + c * bytes, dtype, 1, rows);
    for (int64_t r = 0; r < rows; ++r) to[r * width + c] = column[r];
  }
}

// Tiles of rows that read the same weights one after another share the prefetching of the weights that come next: a
// tile asks for what it reads at steps where step & mask == tile & mask.
inline int64_t prefetch_mask(int64_t tiles) { return tiles >= 8 ? 7 : tiles >= 4 ? 3 : tiles >= 2 ? 1 : 0; }

inline void scale_row(float* row, float scale, int64_t count) {
  for (int64_t n = 0; n < count; ++n) row[n] *= scale;
}

KP_NOT_INLINED void write_row(char* to, const float* from, DType dtype, int64_t stride, int64_t count) {
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
