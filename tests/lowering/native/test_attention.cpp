// Attention with few and with many rows, which are different kernels, in every dtype of keys and values.
#include <algorithm>

#include "testing.h"

namespace kernel_pytorch::testing {
namespace {

struct Shape {
  int64_t rows, keys, dim, value_dim;
};

struct Options {
  DType dtype = DType::kFloat32, kv_dtype = DType::kFloat32;
  DType bias_dtype = DType::kFloat32;
  bool biased = false;
  bool strided = false;  // elements of a key are two apart, which the kernel for few rows does not take
  int64_t window = 0;    // 0: all keys; else row r attends to keys [r, r + window) and to key 0
};

// Whether row attends to key.
bool attends(const Options& options, int64_t row, int64_t key) {
  return options.window == 0 || key == 0 || (key >= row && key < row + options.window);
}

void attention(const KernelTable& kernels, std::mt19937& random, const Shape& shape, const Options& options) {
  const int64_t rows = shape.rows, keys = shape.keys, dim = shape.dim, value_dim = shape.value_dim;
  const int64_t apart = options.strided ? 2 : 1;
  Tensor q(options.dtype, rows * dim, random), k(options.kv_dtype, keys * dim * apart, random);
  Tensor v(options.kv_dtype, keys * value_dim * apart, random), bias(options.bias_dtype, rows * keys, random);
  Tensor k_scales(DType::kFloat32, keys, random, 0.01), v_scales(DType::kFloat32, keys, random, 0.01);
  Tensor out(options.dtype, rows * value_dim), lse(DType::kFloat32, rows);
  const bool scaled = options.kv_dtype == DType::kInt8;

  AttentionTile tile = {};
  tile.rows = rows;
  for (int64_t r = 0; r < rows; ++r) {
    tile.q[r] = q.data() + r * dim * static_cast<int64_t>(size_of(options.dtype));
    tile.out[r] = out.data() + r * value_dim * static_cast<int64_t>(size_of(options.dtype));
    tile.lse[r] = lse.floats() + r;
    if (options.biased) tile.bias[r] = bias.data() + r * keys * static_cast<int64_t>(size_of(options.bias_dtype));
  }
  tile.q_stride = tile.out_stride = tile.bias_stride = 1;
  tile.dtype = options.dtype, tile.kv_dtype = options.kv_dtype, tile.bias_dtype = options.bias_dtype;
  tile.k = k.data(), tile.v = v.data();
  tile.k_row = dim * apart, tile.v_row = value_dim * apart, tile.k_stride = tile.v_stride = apart;
  tile.k_scales = scaled ? k_scales.floats() : nullptr;
  tile.v_scales = scaled ? v_scales.floats() : nullptr;
  tile.dim = dim, tile.value_dim = value_dim, tile.scale = 0.3f;
  std::vector<int32_t> begin(2 * kMaxTileRows, 0), end(2 * kMaxTileRows, INT32_MAX);
  std::vector<KeyRange> ranges = {{0, keys}};
  tile.ranges_per_row = options.window == 0 ? 1 : 2;
  for (int64_t r = 0; r < rows; ++r) {
    const auto n = static_cast<size_t>(r), m = n + kMaxTileRows;
    if (options.window == 0) {
      end[n] = static_cast<int32_t>(keys);
    } else {
      end[n] = 1;
      begin[m] = static_cast<int32_t>(std::min(r, keys));
      end[m] = static_cast<int32_t>(std::min(r + options.window, keys));
    }
  }
  tile.begin = begin.data(), tile.end = end.data();
  tile.ranges = ranges.data(), tile.range_count = keys > 0 ? 1 : 0;
  Tensor scratch(DType::kFloat32, static_cast<int64_t>(kernels.attention_scratch(dim, value_dim) / sizeof(float)));
  kernels.attention(tile, scratch.floats());

  const auto key_at = [&](int64_t n, int64_t d) { return k.at((n * dim + d) * apart) * (scaled ? k_scales.at(n) : 1); };
  const auto value_at = [&](int64_t n, int64_t e) {
    return v.at((n * value_dim + e) * apart) * (scaled ? v_scales.at(n) : 1);
  };
  const int64_t block_count = keys / kKeyBlock + 2;
  const double blocks = static_cast<double>(block_count), scale = static_cast<double>(tile.scale);
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<double> scores, errors;
    std::vector<int64_t> kept;
    double max = -INFINITY, spread = 0;
    for (int64_t n = 0; n < keys; ++n) {
      const bool masked = options.biased && options.bias_dtype == DType::kBool && bias.at(r * keys + n) == 0;
      if (!attends(options, r, n) || masked) continue;
      double score = 0, magnitude = 0;
      for (int64_t d = 0; d < dim; ++d) {
        const double product = q.at(r * dim + d) * key_at(n, d) * scale;
        score += product, magnitude += std::fabs(product);
      }
      if (options.biased && options.bias_dtype != DType::kBool) {
        score += bias.at(r * keys + n), magnitude += std::fabs(bias.at(r * keys + n));
      }
      kept.push_back(n), scores.push_back(score);
      errors.push_back(gamma(static_cast<double>(dim) + 4) * magnitude);
      max = std::max(max, score);
    }
    for (const double score : scores) spread = std::max(spread, max - score);
    // Relative error of one exponential: of its score, of the differences to running maxima, which add up to at most
    // the spread, and of the rescaling after each block, in which exp is within 2 ulp.
    double total = 0, total_error = 0;
    std::vector<double> weights, relative;
    for (size_t n = 0; n < scores.size(); ++n) {
      weights.push_back(std::exp(scores[n] - max));
      relative.push_back(std::expm1(errors[n] + kUnit * (2 * spread + 6 * blocks)));
      total += weights[n], total_error += weights[n] * relative[n];
    }
    const double sum_error = gamma(static_cast<double>(scores.size()));
    const double denominator = scores.empty() ? 0 : total_error / total + sum_error;
    const double wanted_lse = scores.empty() ? -INFINITY : max + std::log(total);
    const double max_error = errors.empty() ? 0 : *std::max_element(errors.begin(), errors.end());
    expect_close(lse.at(r), wanted_lse,
                 max_error + 2 * denominator + 4 * kUnit * (std::fabs(wanted_lse) + std::fabs(max)), "log-sum-exp");
    for (int64_t e = 0; e < value_dim; ++e) {
      double wanted = 0, bound = 0;
      for (size_t n = 0; n < scores.size(); ++n) {
        const double share = weights[n] / total * value_at(kept[n], e);
        wanted += share;
        bound += std::fabs(share) * (relative[n] + sum_error + 4 * kUnit);
      }
      bound += (std::fabs(wanted) + bound) * (denominator / (1 - denominator) + 3 * kUnit);
      const double rounding = options.dtype == DType::kFloat32 ? 0 : unit(options.dtype) * (std::fabs(wanted) + bound);
      expect_close(out.at(r * value_dim + e), wanted, bound + rounding + tiny(options.dtype),
                   std::to_string(rows) + " rows, " + std::to_string(keys) + " keys");
    }
  }
  expect(out.guard_is_intact() && lse.guard_is_intact(), "writes past the end of an output");
}

std::vector<Shape> shapes(const KernelTable& kernels) {
  const int64_t most = kernels.attention_rows;  // few rows: up to four; then one vector; then a full tile
  return {{1, 1, 1, 1},    {1, 70, 64, 64},        {2, 65, 17, 9},         {3, 200, 20, 33}, {4, 64, 40, 24},
          {5, 33, 16, 16}, {most / 2, 130, 24, 8}, {most - 1, 77, 19, 21}, {most, 64, 8, 32}};
}

template <typename Change>
void each_shape(const KernelTable& kernels, std::mt19937& random, Change change) {
  for (const Shape& shape : shapes(kernels)) {
    Options options;
    change(options);
    attention(kernels, random, shape, options);
  }
}

void dtypes(const KernelTable& kernels, std::mt19937& random) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    each_shape(kernels, random, [&](Options& options) { options.dtype = options.kv_dtype = dtype; });
  }
}

void caches(const KernelTable& kernels, std::mt19937& random) {
  for (const DType kv_dtype : {DType::kFloat16, DType::kInt8}) {
    each_shape(kernels, random, [&](Options& options) { options.kv_dtype = kv_dtype; });
  }
}

void biases(const KernelTable& kernels, std::mt19937& random) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kBool}) {
    each_shape(kernels, random, [&](Options& options) { options.biased = true, options.bias_dtype = dtype; });
  }
}

void windows(const KernelTable& kernels, std::mt19937& random) {
  for (const int64_t window : {1, 5, 40}) {
    each_shape(kernels, random, [&](Options& options) { options.window = window; });
  }
}

void strides(const KernelTable& kernels, std::mt19937& random) {
  each_shape(kernels, random, [](Options& options) { options.strided = true; });
  each_shape(kernels, random, [](Options& options) { options.strided = true, options.kv_dtype = DType::kInt8; });
}

void no_keys(const KernelTable& kernels, std::mt19937& random) {
  for (const int64_t rows : {int64_t{1}, kernels.attention_rows}) attention(kernels, random, {rows, 0, 8, 8}, {});
}

}  // namespace

const std::vector<Test> kAttentionTests = {{"dtypes", dtypes},   {"caches", caches},   {"biases", biases},
                                           {"windows", windows}, {"strides", strides}, {"no keys", no_keys}};

}  // namespace kernel_pytorch::testing
