// Rows that are read and written by one function for each instruction set, and columns that become rows.
//
// rows.h has the same as inline functions, whose switch over dtypes makes every caller larger.
#pragma once

#include "kernels/rows.h"

#define KP_NOT_INLINED __attribute__((noinline)) inline

namespace {

KP_NOT_INLINED void read_whole_row(float* to, const char* from, DType dtype, int64_t stride, int64_t count) {
  read_row(to, from, dtype, stride, count);
}

KP_NOT_INLINED void write_whole_row(char* to, const float* from, DType dtype, int64_t stride, int64_t count) {
  write_row(to, from, dtype, stride, count);
}

KP_NOT_INLINED void read_row_at(const View& view, int64_t row, float* to) { read_row_of(view, row, to); }
KP_NOT_INLINED void write_row_at(const View& view, int64_t row, const float* from) { write_row_of(view, row, from); }

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
    read_whole_row(column, from + c * bytes, dtype, 1, rows);
    for (int64_t r = 0; r < rows; ++r) to[r * width + c] = column[r];
  }
}

// Tiles of rows that read the same weights one after another share the prefetching of the weights that come next: a
// tile asks for what it reads at steps where step & mask == tile & mask.
inline int64_t prefetch_mask(int64_t tiles) { return tiles >= 8 ? 7 : tiles >= 4 ? 3 : tiles >= 2 ? 1 : 0; }

}  // namespace
