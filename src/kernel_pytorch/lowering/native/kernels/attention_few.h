// Attention of few rows, as a decoder has them: vectors run along the numbers of a key, so that no lane is idle, and
// keys and values are read once, in the format in which they are held.
#pragma once

#include "kernels/rows.h"
#include "kernels/table.h"

namespace {

using kernel_pytorch::AttentionTile;
using kernel_pytorch::kKeysABlock;
using kernel_pytorch::kMostRows;

constexpr int64_t kFewRows = 4;

struct Float32 {
  using Number = float;
  static Vec vector(const float* p) { return load(p); }
  static float number(const float* p) { return *p; }
};

struct Float16 {
  using Number = uint16_t;
  static Vec vector(const uint16_t* p) { return from_float16(load_halves(p)); }
  static float number(const uint16_t* p) { return half_at(p, false); }
};

struct BFloat16 {
  using Number = uint16_t;
  static Vec vector(const uint16_t* p) { return from_bfloat16(load_halves(p)); }
  static float number(const uint16_t* p) { return half_at(p, true); }
};

struct Int8 {
  using Number = int8_t;
  static Vec vector(const int8_t* p) { return from_int8(p); }
  static float number(const int8_t* p) { return *p; }
};

inline size_t few_scratch_floats(int64_t dim, int64_t value_dim) {
  return static_cast<size_t>(kFewRows * (dim + value_dim + kKeysABlock));
}

// The sum of a vector by halves: as many steps as the number of lanes has bits.
inline float quick_sum(Vec v) {
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

// Of a row's scores, from their largest and the sum of exponentials beside it; -inf where it met no key.
inline float log_sum_exp(float most, float total) { return total == 0 ? -__builtin_inff() : most + __builtin_logf(total); }

// Whether a row attends to all of these keys, by one of its runs.
inline bool row_attends(const AttentionTile& tile, int64_t row, int64_t key, int64_t count) {
  for (int64_t slot = 0; slot < tile.slots; ++slot) {
    const int64_t at = slot * kMostRows + row;
    if (tile.first[at] <= key && tile.last[at] >= key + count) return true;
  }
  return false;
}

// One row's bias, on scores that stand `apart` from each other.
inline void add_bias(const AttentionTile& tile, int64_t row, float* scores, int64_t apart, int64_t key, int64_t count) {
  const char* const own = tile.bias[row];
  for (int64_t n = 0; n < count; ++n) {
    float& score = scores[n * apart];
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

// sums[row] = sums[row] * rescale[row] + values weighted by scores[row], for Wide vectors of each row: several at once,
// because each sum has to wait for itself.
template <typename Format, int Rows, int Wide>
inline void add_values(const typename Format::Number* values, int64_t value_row, const float* scores, int64_t count,
                       const float* rescale, float* sums, int64_t value_dim) {
  Vec yet[Rows][Wide];
  for (int r = 0; r < Rows; ++r) {
    for (int x = 0; x < Wide; ++x) yet[r][x] = load(sums + r * value_dim + x * kLanes) * rescale[r];
  }
  for (int64_t n = 0; n < count; ++n) {
    Vec numbers[Wide];
    for (int x = 0; x < Wide; ++x) numbers[x] = Format::vector(values + n * value_row + x * kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Vec share = splat(scores[r * kKeysABlock + n]);
      for (int x = 0; x < Wide; ++x) yet[r][x] += numbers[x] * share;
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int x = 0; x < Wide; ++x) store(sums + r * value_dim + x * kLanes, yet[r][x]);
  }
}

template <typename Format, int Rows>
void attention_of_few(const AttentionTile& tile, float* scratch) {
  using Number = typename Format::Number;
  const int64_t dim = tile.dim, value_dim = tile.value_dim;
  float* const q = scratch;                            // [row][dim]
  float* const sums = q + Rows * dim;                  // [row][value]
  float* const scores = sums + Rows * value_dim;       // [row][key]
  const Number* const k = reinterpret_cast<const Number*>(tile.k);
  const Number* const v = reinterpret_cast<const Number*>(tile.v);
  const float never = -__builtin_inff();

  for (int64_t n = 0; n < Rows * (dim + value_dim); ++n) q[n] = 0;
  for (int64_t r = 0; r < tile.rows; ++r) {
    read_row(q + r * dim, tile.q[r], tile.dtype, tile.q_stride, dim);
    for (int64_t d = 0; d < dim; ++d) q[r * dim + d] *= tile.scale;
  }
  float most[Rows], total[Rows], rescale[Rows];
  for (int r = 0; r < Rows; ++r) most[r] = never, total[r] = 0;

  for (int64_t run = 0; run < tile.run_count; ++run) {
    for (int64_t key = tile.runs[run].first; key < tile.runs[run].last; key += kKeysABlock) {
      const int64_t left = tile.runs[run].last - key;
      const int64_t count = left < kKeysABlock ? left : kKeysABlock;
      for (int64_t n = 0; n < count; ++n) {
        const Number* const own = k + (key + n) * tile.k_row;
        Vec products[Rows];
        for (int r = 0; r < Rows; ++r) products[r] = Vec{};
        int64_t d = 0;
        for (; d + kLanes <= dim; d += kLanes) {
          const Vec numbers = Format::vector(own + d);
          for (int r = 0; r < Rows; ++r) products[r] += numbers * load(q + r * dim + d);
        }
        float tail[Rows] = {};
        for (; d < dim; ++d) {
          const float number = Format::number(own + d);
          for (int r = 0; r < Rows; ++r) tail[r] += number * q[r * dim + d];
        }
        for (int r = 0; r < Rows; ++r) scores[r * kKeysABlock + n] = quick_sum(products[r]) + tail[r];
      }
      for (int r = 0; r < Rows && r < tile.rows; ++r) {
        float* const own = scores + r * kKeysABlock;
        if (tile.k_scales) {
          for (int64_t n = 0; n < count; ++n) own[n] *= tile.k_scales[key + n];
        }
        if (tile.bias[r]) add_bias(tile, r, own, 1, key, count);
        if (row_attends(tile, r, key, count)) continue;
        for (int64_t n = 0; n < count; ++n) own[n] = row_attends(tile, r, key + n, 1) ? own[n] : never;
      }
      for (int r = 0; r < Rows; ++r) {
        float* const own = scores + r * kKeysABlock;
        for (int64_t n = count; n < kKeysABlock; ++n) own[n] = never;
        Vec largest_yet = splat(most[r]);
        for (int64_t n = 0; n < kKeysABlock; n += kLanes) largest_yet = maximum(load(own + n), largest_yet);
        const float block_most = largest(largest_yet);
        // A row that has met no key yet keeps a maximum of -inf; exp(-inf - 0) is 0 where exp(-inf + inf) is NaN.
        const float safe = block_most == never ? 0.0f : block_most;
        rescale[r] = exp(splat(most[r] - safe))[0];
        most[r] = block_most;
        Vec sum_of_block = {};
        for (int64_t n = 0; n < kKeysABlock; n += kLanes) {
          const Vec e = exp(load(own + n) - safe);
          sum_of_block += e;
          store(own + n, e);
        }
        total[r] = total[r] * rescale[r] + quick_sum(sum_of_block);
        if (tile.v_scales) {
          for (int64_t n = 0; n < count; ++n) own[n] *= tile.v_scales[key + n];
        }
      }
      int64_t e = 0;
      constexpr int kWide = Rows > 2 ? 2 : 4;
      const Number* const values = v + key * tile.v_row;
      for (; e + kWide * kLanes <= value_dim; e += kWide * kLanes) {
        add_values<Format, Rows, kWide>(values + e, tile.v_row, scores, count, rescale, sums + e, value_dim);
      }
      for (; e + kLanes <= value_dim; e += kLanes) {
        add_values<Format, Rows, 1>(values + e, tile.v_row, scores, count, rescale, sums + e, value_dim);
      }
      for (; e < value_dim; ++e) {
        for (int r = 0; r < Rows; ++r) sums[r * value_dim + e] *= rescale[r];
        for (int64_t n = 0; n < count; ++n) {
          const float number = Format::number(values + n * tile.v_row + e);
          for (int r = 0; r < Rows; ++r) sums[r * value_dim + e] += number * scores[r * kKeysABlock + n];
        }
      }
    }
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    const float inverse = total[r] == 0 ? 0.0f : 1.0f / total[r];
    for (int64_t e = 0; e < value_dim; ++e) sums[r * value_dim + e] *= inverse;
    if (tile.lse[r]) *tile.lse[r] = log_sum_exp(most[r], total[r]);
    write_row(tile.out[r], sums + r * value_dim, tile.dtype, tile.out_stride, value_dim);
  }
}

template <typename Format>
inline void attention_of_few(const AttentionTile& tile, float* scratch) {
  if (tile.rows == 1) return attention_of_few<Format, 1>(tile, scratch);
  if (tile.rows == 2) return attention_of_few<Format, 2>(tile, scratch);
  attention_of_few<Format, kFewRows>(tile, scratch);
}

// Whether the tile is one of these, and if so, computed.
inline bool attention_was_of_few(const AttentionTile& tile, float* scratch) {
  if (tile.rows > kFewRows || tile.k_stride != 1 || tile.v_stride != 1) return false;
  switch (tile.kv_dtype) {
    case DType::kFloat32:
      attention_of_few<Float32>(tile, scratch);
      return true;
    case DType::kFloat16:
      attention_of_few<Float16>(tile, scratch);
      return true;
    case DType::kBFloat16:
      attention_of_few<BFloat16>(tile, scratch);
      return true;
    case DType::kInt8:
      attention_of_few<Int8>(tile, scratch);
      return true;
    default:
      return false;
  }
}

}  // namespace
