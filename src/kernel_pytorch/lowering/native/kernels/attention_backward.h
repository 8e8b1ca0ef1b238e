// The gradients of attention for one tile of rows: for each block of keys the probabilities again, from the
// log-sum-exp, and the five products of FlashAttention's backward.
//
// As in the forward, a lane is a row of the tile where rows are the result (scores, the gradients of scores and of
// queries); where keys are the result (the gradients of keys and values), lanes run along the head dimension.
#pragma once

#include "kernels/attention.h"

namespace {

using kernel_pytorch::AttentionBackwardTile;

#if defined(KP_TARGET_AVX2) && !defined(KP_TARGET_AVX512)
constexpr int kOuterWide = 2;
#else
constexpr int kOuterWide = 4;
#endif
constexpr int kOuterTall = 4;

inline size_t attention_backward_scratch_bytes(int64_t dim, int64_t value_dim) {
  const int64_t rows = (3 * dim + 2 * value_dim + 2 * kKeyBlock) * kTileRows;
  const int64_t blocks = kKeyBlock * (dim + value_dim);
  const int64_t row = dim > value_dim ? dim : value_dim;
  return static_cast<size_t>(rows + blocks + row) * sizeof(float);
}

// into[m][x] += sum over n of left[m][n] * right[n][x], for Tall rows of m and Wide vectors of x.
template <int Tall, int Wide>
inline void add_products(float* into, int64_t into_row, const float* left, int64_t left_row, const float* right,
                         int64_t right_row, int64_t count) {
  Vec acc[Tall][Wide];
  for (int m = 0; m < Tall; ++m) {
    for (int x = 0; x < Wide; ++x) acc[m][x] = Vec{};
  }
  for (int64_t n = 0; n < count; ++n) {
    Vec own[Wide];
    for (int x = 0; x < Wide; ++x) own[x] = load(right + n * right_row + x * kLanes);
    for (int m = 0; m < Tall; ++m) {
      const Vec factor = splat(left[m * left_row + n]);
      for (int x = 0; x < Wide; ++x) acc[m][x] += factor * own[x];
    }
  }
  for (int m = 0; m < Tall; ++m) {
    for (int x = 0; x < Wide; ++x) {
      float* const p = into + m * into_row + x * kLanes;
      store(p, load(p) + acc[m][x]);
    }
  }
}

template <int Wide>
inline void add_columns(float* into, int64_t into_row, int64_t rows, const float* left, int64_t left_row,
                        const float* right, int64_t right_row, int64_t count) {
  int64_t m = 0;
  for (; m + kOuterTall <= rows; m += kOuterTall) {
    add_products<kOuterTall, Wide>(into + m * into_row, into_row, left + m * left_row, left_row, right, right_row,
                                   count);
  }
  for (; m < rows; ++m) {
    add_products<1, Wide>(into + m * into_row, into_row, left + m * left_row, left_row, right, right_row, count);
  }
}

// into[key][e] += sum over rows of left[key][row] * x[row][e]; `by_element` is x as [e][row], `by_row` as [row][e].
template <int Vectors>
inline void add_to_keys(float* into, int64_t keys, int64_t elements, const float* left, const float* by_row,
                        const float* by_element) {
  constexpr int64_t kWide = Vectors * kLanes;
  int64_t e = 0;
  for (; e + kOuterWide * kLanes <= elements; e += kOuterWide * kLanes) {
    add_columns<kOuterWide>(into + e, elements, keys, left, kWide, by_row + e, elements, kWide);
  }
  for (; e + kLanes <= elements; e += kLanes) {
    add_columns<1>(into + e, elements, keys, left, kWide, by_row + e, elements, kWide);
  }
  for (; e < elements; ++e) {
    for (int64_t n = 0; n < keys; ++n) {
      Vec products = {};
      for (int x = 0; x < Vectors; ++x) {
        products += load(left + (n * Vectors + x) * kLanes) * load(by_element + (e * Vectors + x) * kLanes);
      }
      into[n * elements + e] += sum_lanes(products);
    }
  }
}

// Reads the rows of a tile, as [row][element] and as [element][row]; rows past the end are zeros.
inline void read_tile(float* by_row, float* by_element, int64_t wide, int64_t rows, int64_t elements,
                      const char* const* from, DType dtype, int64_t stride, float factor) {
  for (int64_t r = 0; r < wide; ++r) {
    float* const own = by_row + r * elements;
    if (r < rows) {
      read_row(own, from[r], dtype, stride, elements);
      for (int64_t e = 0; e < elements; ++e) own[e] *= factor;
    } else {
      for (int64_t e = 0; e < elements; ++e) own[e] = 0;
    }
    for (int64_t e = 0; e < elements; ++e) by_element[e * wide + r] = own[e];
  }
}

template <int Vectors>
void attention_backward_tile(const AttentionBackwardTile& task, float* scratch) {
  constexpr int64_t kWide = Vectors * kLanes;
  const AttentionTile& tile = task.tile;
  const int64_t dim = tile.dim, value_dim = tile.value_dim;
  float* const q_rows = scratch;                      // [row][dim]
  float* const q = q_rows + dim * kWide;              // [dim][row]
  float* const dq = q + dim * kWide;                  // [dim][row]
  float* const dout_rows = dq + dim * kWide;          // [row][value]
  float* const dout = dout_rows + value_dim * kWide;  // [value][row]
  float* const p = dout + value_dim * kWide;          // [key][row]
  float* const ds = p + kKeyBlock * kWide;            // [key][row]
  float* const keys = ds + kKeyBlock * kWide;         // [key][dim], if they cannot be read in place
  float* const values = keys + kKeyBlock * dim;
  float* const row = values + kKeyBlock * value_dim;
  const bool k_in_place = tile.kv_dtype == DType::kFloat32 && tile.k_stride == 1;
  const bool v_in_place = tile.kv_dtype == DType::kFloat32 && tile.v_stride == 1;
  const int64_t kv_bytes = static_cast<int64_t>(kernel_pytorch::size_of(tile.kv_dtype));

  read_tile(q_rows, q, kWide, tile.rows, dim, tile.q, tile.dtype, tile.q_stride, tile.scale);
  read_tile(dout_rows, dout, kWide, tile.rows, value_dim, task.dout, tile.dtype, task.dout_stride, 1.0f);
  for (int64_t n = 0; n < dim * kWide; ++n) dq[n] = 0;
  float lse_rows[kWide], delta_rows[kWide];
  for (int64_t r = 0; r < kWide; ++r) {
    // exp(score - infinity) is 0: rows past the end, and rows that attend to nothing, give nothing.
    lse_rows[r] = __builtin_inff();
    delta_rows[r] = 0;
    if (r >= tile.rows) continue;
    read_row(row, tile.out[r], tile.dtype, tile.out_stride, value_dim);
    float delta = 0;
    for (int64_t e = 0; e < value_dim; ++e) delta += row[e] * dout_rows[r * value_dim + e];
    delta_rows[r] = task.dlse[r] ? delta - *task.dlse[r] : delta;
    if (*tile.lse[r] > -__builtin_inff()) lse_rows[r] = *tile.lse[r];
  }
  Vec lse[Vectors], delta[Vectors], ones[Vectors];
  for (int x = 0; x < Vectors; ++x) {
    lse[x] = load(lse_rows + x * kLanes);
    delta[x] = load(delta_rows + x * kLanes);
    ones[x] = splat(1.0f);
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
        }
        k_at = keys, k_row = dim;
      }
      if (v_in_place) {
        v_at = reinterpret_cast<const float*>(tile.v) + key * v_row;
      } else {
        for (int64_t n = 0; n < count; ++n) {
          read_row(values + n * value_dim, tile.v + (key + n) * tile.v_row * kv_bytes, tile.kv_dtype, tile.v_stride,
                   value_dim);
        }
        v_at = values, v_row = value_dim;
      }
      multiply_all<Vectors>(p, count, k_at, k_row, 1, q, dim, nullptr);
      if (!block_is_whole<Vectors>(tile, key, count)) apply_mask<Vectors>(tile, p, key, count);
      multiply_all<Vectors>(ds, count, v_at, v_row, 1, dout, value_dim, nullptr);
      for (int64_t n = 0; n < count; ++n) {
        for (int x = 0; x < Vectors; ++x) {
          float* const own = p + (n * Vectors + x) * kLanes;
          float* const other = ds + (n * Vectors + x) * kLanes;
          const Vec probability = exp(load(own) - lse[x]);
          store(own, probability);
          store(other, probability * (load(other) - delta[x]));
        }
      }
      add_to_keys<Vectors>(task.dv + key * value_dim, count, value_dim, p, dout_rows, dout);
      add_to_keys<Vectors>(task.dk + key * dim, count, dim, ds, q_rows, q);
      multiply_all<Vectors>(dq, dim, k_at, 1, k_row, ds, count, ones);
    }
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    for (int64_t d = 0; d < dim; ++d) row[d] = dq[d * kWide + r] * tile.scale;
    write_row(task.dq[r], row, tile.dtype, task.dq_stride, dim);
  }
}

inline void attention_backward(const AttentionBackwardTile& task, float* scratch) {
  if (task.tile.rows <= kLanes) {
    attention_backward_tile<1>(task, scratch);
  } else {
    attention_backward_tile<kVectors>(task, scratch);
  }
}

}  // namespace
