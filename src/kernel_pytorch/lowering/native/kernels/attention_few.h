// Attention of up to four rows, as in decoding: vector lanes run along the head dimension, so that none is idle, and
// keys and values are read once, in the dtype in which they are stored.
#pragma once

#include "kernels/rows.h"
#include "kernels/table.h"

namespace {

using kernel_pytorch::AttentionTile;
using kernel_pytorch::kKeyBlock;
using kernel_pytorch::kMaxTileRows;

constexpr int64_t kFewRows = 4;

inline size_t few_scratch_floats(int64_t dim, int64_t value_dim) {
  return static_cast<size_t>(kFewRows * (dim + value_dim + kKeyBlock));
}

// The sum of all lanes by halving, in log2(lanes) steps.
inline float sum_lanes(Vec v) {
#if KP_LANES > 4
  typedef float Half __attribute__((vector_size(2 * KP_LANES)));
  Half a, b;
  __builtin_memcpy(&a, &v, sizeof(a));
  __builtin_memcpy(&b, reinterpret_cast<const char*>(&v) + sizeof(a), sizeof(b));
  a += b;
#if KP_LANES > 8
  typedef float Quarter __attribute__((vector_size(KP_LANES)));
  Quarter c, d;
  __builtin_memcpy(&c, &a, sizeof(c));
  __builtin_memcpy(&d, reinterpret_cast<const char*>(&a) + sizeof(c), sizeof(d));
  c += d;
  return (c[0] + c[2]) + (c[1] + c[3]);
#else
  return (a[0] + a[2]) + (a[1] + a[3]);
#endif
#else
  return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// Log-sum-exp from the maximum score and the sum of exponentials relative to it; -inf for a row without keys.
inline float log_sum_exp(float max, float total) {
  return total == 0 ? -__builtin_inff() : max + __builtin_logf(total);
}

// Whether one range of a row covers keys [key, key + count).
inline bool row_attends(const AttentionTile& tile, int64_t row, int64_t key, int64_t count) {
  for (int64_t n = 0; n < tile.ranges_per_row; ++n) {
    const int64_t at = n * kMaxTileRows + row;
    if (tile.begin[at] <= key && tile.end[at] >= key + count) return true;
  }
  return false;
}

// Adds the bias of one row to scores that are `stride` elements apart.
inline void add_bias(const AttentionTile& tile, int64_t row, float* scores, int64_t stride, int64_t key,
                     int64_t count) {
  const char* const own = tile.bias[row];
  for (int64_t n = 0; n < count; ++n) {
    float& score = scores[n * stride];
    const int64_t at = (key + n) * tile.bias_stride;
    if (tile.bias_dtype == DType::kBool) {
      score = own[at] ? score : -__builtin_inff();
    } else if (tile.bias_dtype == DType::kFloat32) {
      score += reinterpret_cast<const float*>(own)[at];
    } else {
      score += half_at(reinterpret_cast<const uint16_t*>(own) + at, tile.bias_dtype == DType::kBFloat16);
    }
  }
}

// acc[row] = acc[row] * rescale[row] + scores[row] x values, for Wide vectors of each row. Several accumulators hide
// the latency of the multiply-adds.
template <typename Format, int Rows, int Wide>
inline void add_values(const typename Format::Element* values, int64_t value_row, const float* scores, int64_t count,
                       const float* rescale, float* acc, int64_t value_dim) {
  Vec own[Rows][Wide];
  for (int r = 0; r < Rows; ++r) {
    for (int x = 0; x < Wide; ++x) own[r][x] = load(acc + r * value_dim + x * kLanes) * rescale[r];
  }
  for (int64_t n = 0; n < count; ++n) {
    Vec elements[Wide];
    for (int x = 0; x < Wide; ++x) elements[x] = Format::vector(values + n * value_row + x * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = splat(scores[r * kKeyBlock + n]);
      for (int x = 0; x < Wide; ++x) own[r][x] += elements[x] * weight;
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int x = 0; x < Wide; ++x) store(acc + r * value_dim + x * kLanes, own[r][x]);
  }
}

template <typename Format, int Rows>
void attention_rows(const AttentionTile& tile, float* scratch) {
  using Element = typename Format::Element;
  const int64_t dim = tile.dim, value_dim = tile.value_dim;
  float* const q = scratch;                      // [row][dim]
  float* const acc = q + Rows * dim;             // [row][value]
  float* const scores = acc + Rows * value_dim;  // [row][key]
  const Element* const k = reinterpret_cast<const Element*>(tile.k);
  const Element* const v = reinterpret_cast<const Element*>(tile.v);
  const float kMasked = -__builtin_inff();

  for (int64_t n = 0; n < Rows * (dim + value_dim); ++n) q[n] = 0;
  for (int64_t r = 0; r < tile.rows; ++r) {
    read_row(q + r * dim, tile.q[r], tile.dtype, tile.q_stride, dim);
    for (int64_t d = 0; d < dim; ++d) q[r * dim + d] *= tile.scale;
  }
  float max[Rows], total[Rows], rescale[Rows];
  for (int r = 0; r < Rows; ++r) max[r] = kMasked, total[r] = 0;

  for (int64_t range = 0; range < tile.range_count; ++range) {
    for (int64_t key = tile.ranges[range].begin; key < tile.ranges[range].end; key += kKeyBlock) {
      const int64_t left = tile.ranges[range].end - key;
      const int64_t count = left < kKeyBlock ? left : kKeyBlock;
      for (int64_t n = 0; n < count; ++n) {
        const Element* const own = k + (key + n) * tile.k_row;
        Vec products[Rows];
        for (int r = 0; r < Rows; ++r) products[r] = Vec{};
        int64_t d = 0;
        for (; d + kLanes <= dim; d += kLanes) {
          const Vec elements = Format::vector(own + d);
          for (int r = 0; r < Rows; ++r) products[r] += elements * load(q + r * dim + d);
        }
        float tail[Rows] = {};
        for (; d < dim; ++d) {
          const float element = Format::element(own + d);
          for (int r = 0; r < Rows; ++r) tail[r] += element * q[r * dim + d];
        }
        for (int r = 0; r < Rows; ++r) scores[r * kKeyBlock + n] = sum_lanes(products[r]) + tail[r];
      }
      for (int r = 0; r < Rows && r < tile.rows; ++r) {
        float* const own = scores + r * kKeyBlock;
        if (tile.k_scales) {
          for (int64_t n = 0; n < count; ++n) own[n] *= tile.k_scales[key + n];
        }
        if (tile.bias[r]) add_bias(tile, r, own, 1, key, count);
        if (row_attends(tile, r, key, count)) continue;
        for (int64_t n = 0; n < count; ++n) own[n] = row_attends(tile, r, key + n, 1) ? own[n] : kMasked;
      }
      for (int r = 0; r < Rows; ++r) {
        float* const own = scores + r * kKeyBlock;
        for (int64_t n = count; n < kKeyBlock; ++n) own[n] = kMasked;
        Vec lane_max = splat(max[r]);
        for (int64_t n = 0; n < kKeyBlock; n += kLanes) lane_max = maximum(load(own + n), lane_max);
        const float block_max = largest(lane_max);
        // A row without keys so far has a maximum of -inf: exp(-inf - 0) is 0, but exp(-inf + inf) is NaN.
        const float safe = block_max == kMasked ? 0.0f : block_max;
        rescale[r] = exp(splat(max[r] - safe))[0];
        max[r] = block_max;
        Vec block_sum = {};
        for (int64_t n = 0; n < kKeyBlock; n += kLanes) {
          const Vec e = exp(load(own + n) - safe);
          block_sum += e;
          store(own + n, e);
        }
        total[r] = total[r] * rescale[r] + sum_lanes(block_sum);
        if (tile.v_scales) {
          for (int64_t n = 0; n < count; ++n) own[n] *= tile.v_scales[key + n];
        }
      }
      int64_t e = 0;
      constexpr int kWide = Rows > 2 ? 2 : 4;
      const Element* const values = v + key * tile.v_row;
      for (; e + kWide * kLanes <= value_dim; e += kWide * kLanes) {
        add_values<Format, Rows, kWide>(values + e, tile.v_row, scores, count, rescale, acc + e, value_dim);
      }
      for (; e + kLanes <= value_dim; e += kLanes) {
        add_values<Format, Rows, 1>(values + e, tile.v_row, scores, count, rescale, acc + e, value_dim);
      }
      for (; e < value_dim; ++e) {
        for (int r = 0; r < Rows; ++r) acc[r * value_dim + e] *= rescale[r];
        for (int64_t n = 0; n < count; ++n) {
          const float element = Format::element(values + n * tile.v_row + e);
          for (int r = 0; r < Rows; ++r) acc[r * value_dim + e] += element * scores[r * kKeyBlock + n];
        }
      }
    }
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float inverse = total[r] == 0 ? 0.0f : 1.0f / total[r];
    for (int64_t e = 0; e < value_dim; ++e) acc[r * value_dim + e] *= inverse;
    if (tile.lse[r]) *tile.lse[r] = log_sum_exp(max[r], total[r]);
    write_row(tile.out[r], acc + r * value_dim, tile.dtype, tile.out_stride, value_dim);
  }
}

template <typename Format>
inline void attention_rows(const AttentionTile& tile, float* scratch) {
  if (tile.rows == 1) return attention_rows<Format, 1>(tile, scratch);
  if (tile.rows == 2) return attention_rows<Format, 2>(tile, scratch);
  attention_rows<Format, kFewRows>(tile, scratch);
}

// Computes a tile of few rows; returns false without computing anything if the tile has too many rows or strides.
inline bool attention_few_rows(const AttentionTile& tile, float* scratch) {
  if (tile.rows > kFewRows || tile.k_stride != 1 || tile.v_stride != 1) return false;
  switch (tile.kv_dtype) {
    case DType::kFloat32:
      attention_rows<Float32>(tile, scratch);
      return true;
    case DType::kFloat16:
      attention_rows<Float16>(tile, scratch);
      return true;
    case DType::kBFloat16:
      attention_rows<BFloat16>(tile, scratch);
      return true;
    case DType::kInt8:
      attention_rows<Int8>(tile, scratch);
      return true;
    default:
      return false;
  }
}

}  // namespace
