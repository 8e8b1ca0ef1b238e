// FlashAttention for one tile of rows: for each block of keys the scores, an online softmax, and the output so far.
//
// A vector lane is a row of the tile: scores are [key][row] and the output is [value][row]. Keys and values are read in
// place, one element broadcast to all rows, and no maximum or sum is taken across lanes.
#pragma once

#include "kernels/attention_few.h"
#include "kernels/rows.h"
#include "kernels/table.h"

namespace {

using kernel_pytorch::AttentionTile;
using kernel_pytorch::kKeyBlock;
using kernel_pytorch::kMaxTileRows;

#if defined(KP_TARGET_AVX512)
constexpr int kVectors = 2, kTall = 8;  // 16 accumulators in 32 registers
#elif defined(KP_TARGET_AVX2)
constexpr int kVectors = 2, kTall = 4;  // 8 accumulators in 16 registers
#else
constexpr int kVectors = 4, kTall = 4;  // 16 accumulators in NEON's 32 registers
#endif
constexpr int64_t kTileRows = kVectors * kLanes;

inline size_t attention_scratch_bytes(int64_t dim, int64_t value_dim) {
  const int64_t floats = (dim + kKeyBlock + value_dim + 3) * kTileRows + kKeyBlock * (dim + value_dim);
  const size_t few = few_scratch_floats(dim, value_dim);
  return (static_cast<size_t>(floats) > few ? static_cast<size_t>(floats) : few) * sizeof(float);
}

// into[m][row] (+)= sum over n of left[m * left_m + n * left_n] * right[n][row], for Tall rows of m.
template <int Vectors, int Tall>
inline void multiply(float* into, const float* left, int64_t left_m, int64_t left_n, const float* right, int64_t count,
                     const Vec* rescale) {
  Vec acc[Tall][Vectors];
  for (int m = 0; m < Tall; ++m) {
    for (int x = 0; x < Vectors; ++x) {
      acc[m][x] = rescale ? load(into + (m * Vectors + x) * kLanes) * rescale[x] : Vec{};
    }
  }
  for (int64_t n = 0; n < count; ++n) {
    Vec own[Vectors];
    for (int x = 0; x < Vectors; ++x) own[x] = load(right + (n * Vectors + x) * kLanes);
    for (int m = 0; m < Tall; ++m) {
      const Vec factor = splat(left[m * left_m + n * left_n]);
      for (int x = 0; x < Vectors; ++x) acc[m][x] += factor * own[x];
    }
  }
  for (int m = 0; m < Tall; ++m) {
    for (int x = 0; x < Vectors; ++x) store(into + (m * Vectors + x) * kLanes, acc[m][x]);
  }
}

template <int Vectors>
inline void multiply_all(float* into, int64_t rows, const float* left, int64_t left_m, int64_t left_n,
                         const float* right, int64_t count, const Vec* rescale) {
  int64_t m = 0;
  for (; m + kTall <= rows; m += kTall) {
    multiply<Vectors, kTall>(into + m * Vectors * kLanes, left + m * left_m, left_m, left_n, right, count, rescale);
  }
  for (; m < rows; ++m) {
    multiply<Vectors, 1>(into + m * Vectors * kLanes, left + m * left_m, left_m, left_n, right, count, rescale);
  }
}

// Whether every row attends to every key of the block.
template <int Vectors>
inline bool block_is_whole(const AttentionTile& tile, int64_t key, int64_t count) {
  for (int x = 0; x < Vectors; ++x) {
    IntVec covered = {};
    for (int64_t n = 0; n < tile.ranges_per_row; ++n) {
      const int64_t at = n * kMaxTileRows + x * kLanes;
      covered |= (load_ints(tile.begin + at) <= static_cast<int32_t>(key)) &
                 (load_ints(tile.end + at) >= static_cast<int32_t>(key + count));
    }
    if (!all(covered)) return false;
  }
  return true;
}

template <int Vectors>
inline void apply_mask(const AttentionTile& tile, float* scores, int64_t key, int64_t count) {
  const Vec masked = splat(-__builtin_inff());
  for (int64_t n = 0; n < count; ++n) {
    const int32_t j = static_cast<int32_t>(key + n);
    for (int x = 0; x < Vectors; ++x) {
      IntVec attends = {};
      for (int64_t m = 0; m < tile.ranges_per_row; ++m) {
        const int64_t at = m * kMaxTileRows + x * kLanes;
        attends |= (load_ints(tile.begin + at) <= j) & (load_ints(tile.end + at) > j);
      }
      float* p = scores + (n * Vectors + x) * kLanes;
      store(p, select(attends, load(p), masked));
    }
  }
}

template <int Vectors>
void attention_tile(const AttentionTile& tile, float* scratch) {
  constexpr int64_t kWide = Vectors * kLanes;
  const int64_t dim = tile.dim, value_dim = tile.value_dim;
  float* const q = scratch;                       // [dim][row]
  float* const scores = q + dim * kWide;          // [key][row]
  float* const acc = scores + kKeyBlock * kWide;  // [value][row]
  float* const keys = acc + value_dim * kWide;    // [key][dim], if they cannot be read in place
  float* const values = keys + kKeyBlock * dim;
  const bool plain = tile.kv_dtype == DType::kFloat32;
  // Rows that are far apart in memory, such as those of a fused QKV projection, map to few sets of the L1 cache and
  // evict each other: they are copied. A tile of one vector reads them too few times for the copy to pay.
  const bool k_in_place = plain && tile.k_stride == 1 && (tile.k_row == dim || Vectors == 1);
  const bool v_in_place = plain && tile.v_stride == 1 && (tile.v_row == value_dim || Vectors == 1);
  const int64_t bytes = static_cast<int64_t>(kernel_pytorch::size_of(tile.dtype));
  const int64_t kv_bytes = static_cast<int64_t>(kernel_pytorch::size_of(tile.kv_dtype));

  for (int64_t n = 0; n < dim * kWide; ++n) q[n] = 0;
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t d = 0; d < dim; ++d) {
      float element;
      read_row(&element, tile.q[r] + d * tile.q_stride * bytes, tile.dtype, 1, 1);
      q[d * kWide + r] = element * tile.scale;
    }
  }
  for (int64_t n = 0; n < value_dim * kWide; ++n) acc[n] = 0;
  Vec max[Vectors], total[Vectors], rescale[Vectors];
  for (int x = 0; x < Vectors; ++x) {
    max[x] = splat(-__builtin_inff());
    total[x] = Vec{};
  }

  for (int64_t range = 0; range < tile.range_count; ++range) {
    for (int64_t key = tile.ranges[range].begin; key < tile.ranges[range].end; key += kKeyBlock) {
      const int64_t left = tile.ranges[range].end - key;
      const int64_t count = left < kKeyBlock ? left : kKeyBlock;
      const float *k_at, *v_at;
      int64_t k_row = tile.k_row, v_row = tile.v_row;
      if (k_in_place) {
        k_at = reinterpret_cast<const float*>(tile.k) + key * k_row;
      } else {
        for (int64_t n = 0; n < count; ++n) {
          read_row(keys + n * dim, tile.k + (key + n) * tile.k_row * kv_bytes, tile.kv_dtype, tile.k_stride, dim);
          if (tile.k_scales) scale_row(keys + n * dim, tile.k_scales[key + n], dim);
        }
        k_at = keys, k_row = dim;
      }
      if (v_in_place) {
        v_at = reinterpret_cast<const float*>(tile.v) + key * v_row;
      } else {
        for (int64_t n = 0; n < count; ++n) {
          read_row(values + n * value_dim, tile.v + (key + n) * tile.v_row * kv_bytes, tile.kv_dtype, tile.v_stride,
                   value_dim);
          if (tile.v_scales) scale_row(values + n * value_dim, tile.v_scales[key + n], value_dim);
        }
        v_at = values, v_row = value_dim;
      }
      multiply_all<Vectors>(scores, count, k_at, k_row, 1, q, dim, nullptr);
      for (int64_t r = 0; tile.bias[0] && r < tile.rows; ++r) add_bias(tile, r, scores + r, kWide, key, count);
      if (!block_is_whole<Vectors>(tile, key, count)) apply_mask<Vectors>(tile, scores, key, count);

      Vec block_max[Vectors];
      for (int x = 0; x < Vectors; ++x) block_max[x] = max[x];
      for (int64_t n = 0; n < count; ++n) {
        for (int x = 0; x < Vectors; ++x) {
          block_max[x] = maximum(load(scores + (n * Vectors + x) * kLanes), block_max[x]);
        }
      }
      Vec safe[Vectors];
      for (int x = 0; x < Vectors; ++x) {
        // A row without keys so far has a maximum of -inf: exp(-inf - 0) is 0, but exp(-inf + inf) is NaN.
        safe[x] = select(block_max[x] == -__builtin_inff(), Vec{}, block_max[x]);
        rescale[x] = exp(max[x] - safe[x]);
        max[x] = block_max[x];
        total[x] *= rescale[x];
      }
      for (int64_t n = 0; n < count; ++n) {
        for (int x = 0; x < Vectors; ++x) {
          float* p = scores + (n * Vectors + x) * kLanes;
          const Vec e = exp(load(p) - safe[x]);
          total[x] += e;
          store(p, e);
        }
      }
      multiply_all<Vectors>(acc, value_dim, v_at, 1, v_row, scores, count, rescale);
    }
  }

  Vec inverse[Vectors];
  for (int x = 0; x < Vectors; ++x) inverse[x] = select(total[x] == 0.0f, Vec{}, 1.0f / total[x]);
  for (int64_t e = 0; e < value_dim; ++e) {
    for (int x = 0; x < Vectors; ++x) {
      float* p = acc + (e * Vectors + x) * kLanes;
      store(p, load(p) * inverse[x]);
    }
  }
  for (int64_t r = 0; tile.lse[0] && r < tile.rows; ++r) {
    *tile.lse[r] = log_sum_exp(max[r / kLanes][r % kLanes], total[r / kLanes][r % kLanes]);
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    // Through a contiguous row, so that float16 and bfloat16 are converted a vector at a time.
    for (int64_t e = 0; e < value_dim; e += kKeyBlock) {
      const int64_t count = value_dim - e < kKeyBlock ? value_dim - e : kKeyBlock;
      for (int64_t n = 0; n < count; ++n) scores[n] = acc[(e + n) * kWide + r];
      write_row(tile.out[r] + e * tile.out_stride * bytes, scores, tile.dtype, tile.out_stride, count);
    }
  }
}

inline void attention(const AttentionTile& tile, float* scratch) {
  if (attention_few_rows(tile, scratch)) return;
  if (tile.rows <= kLanes) {
    attention_tile<1>(tile, scratch);
  } else {
    attention_tile<kVectors>(tile, scratch);
  }
}

}  // namespace
