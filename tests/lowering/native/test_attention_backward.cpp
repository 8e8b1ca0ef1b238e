// The gradients of attention of one tile, in every dtype, for head dimensions that are no whole vectors.
#include <algorithm>

#include "testing.h"

namespace kernel_pytorch::testing {
namespace {

struct Shape {
  int64_t rows, keys, dim, value_dim;
};

// A sum in double, and the sum of the magnitudes of its terms, which bounds the error of any order of accumulation.
struct Sum {
  double value = 0, magnitude = 0;

  void add(double term, double term_magnitude) {
    value += term;
    magnitude += term_magnitude;
  }
  void add(double term) { add(term, std::fabs(term)); }
};

// Row r attends to keys [r, r + window) and to key 0; to all keys if the window is 0.
void gradients(const KernelTable& kernels, std::mt19937& random, const Shape& shape, DType dtype, int64_t window,
               bool with_dlse) {
  const int64_t rows = shape.rows, keys = shape.keys, dim = shape.dim, value_dim = shape.value_dim;
  const auto bytes = static_cast<int64_t>(size_of(dtype));
  Tensor q(dtype, rows * dim, random), k(dtype, keys * dim, random), v(dtype, keys * value_dim, random);
  Tensor dout(dtype, rows * value_dim, random), out(dtype, rows * value_dim), dlse(DType::kFloat32, rows, random);
  Tensor lse(DType::kFloat32, rows), dq(dtype, rows * dim);
  Tensor dk(DType::kFloat32, keys * dim, random), dv(DType::kFloat32, keys * value_dim, random);
  const Tensor dk_before = dk, dv_before = dv;  // the kernel adds to what is there

  AttentionBackwardTile task = {};
  AttentionTile& tile = task.tile;
  tile.rows = rows;
  tile.q_stride = tile.out_stride = task.dout_stride = task.dq_stride = tile.k_stride = tile.v_stride = 1;
  tile.dtype = tile.kv_dtype = dtype;
  tile.k = k.data(), tile.v = v.data();
  tile.k_row = tile.dim = dim, tile.v_row = tile.value_dim = value_dim, tile.scale = 0.3f;
  std::vector<int32_t> begin(2 * kMaxTileRows, 0), end(2 * kMaxTileRows, INT32_MAX);
  std::vector<KeyRange> ranges = {{0, keys}};
  tile.ranges_per_row = window == 0 ? 1 : 2;
  tile.ranges = ranges.data(), tile.range_count = 1;
  for (int64_t r = 0; r < rows; ++r) {
    tile.q[r] = q.data() + r * dim * bytes, task.dq[r] = dq.data() + r * dim * bytes;
    tile.out[r] = out.data() + r * value_dim * bytes, task.dout[r] = dout.data() + r * value_dim * bytes;
    tile.lse[r] = lse.floats() + r;
    task.dlse[r] = with_dlse ? dlse.floats() + r : nullptr;
    const auto n = static_cast<size_t>(r), m = n + kMaxTileRows;
    end[n] = static_cast<int32_t>(window == 0 ? keys : 1);
    if (window > 0) begin[m] = static_cast<int32_t>(std::min(r, keys));
    if (window > 0) end[m] = static_cast<int32_t>(std::min(r + window, keys));
  }
  tile.begin = begin.data(), tile.end = end.data();
  task.dk = dk.floats(), task.dv = dv.floats();

  // The forward, so that out and lse are what a kernel stored.
  Tensor forward(DType::kFloat32, static_cast<int64_t>(kernels.attention_scratch(dim, value_dim) / sizeof(float)));
  kernels.attention(tile, forward.floats());
  Tensor scratch(DType::kFloat32,
                 static_cast<int64_t>(kernels.attention_backward_scratch(dim, value_dim) / sizeof(float)));
  kernels.attention_backward(task, scratch.floats());

  const double scale = static_cast<double>(tile.scale);
  std::vector<Sum> all_dk(static_cast<size_t>(keys * dim)), all_dv(static_cast<size_t>(keys * value_dim));
  const double terms = static_cast<double>(rows + keys + dim + value_dim) + 16;
  double worst = 0;  // relative error of a probability: of its score and of the log-sum-exp
  for (int64_t r = 0; r < rows; ++r) {
    Sum delta;
    for (int64_t e = 0; e < value_dim; ++e) delta.add(out.at(r * value_dim + e) * dout.at(r * value_dim + e));
    if (with_dlse) delta.add(-dlse.at(r));
    std::vector<Sum> row(static_cast<size_t>(dim));
    for (int64_t n = 0; n < keys; ++n) {
      if (window > 0 && n != 0 && (n < r || n >= r + window)) continue;
      Sum score, dp;
      for (int64_t d = 0; d < dim; ++d) score.add(q.at(r * dim + d) * k.at(n * dim + d) * scale);
      for (int64_t e = 0; e < value_dim; ++e) dp.add(dout.at(r * value_dim + e) * v.at(n * value_dim + e));
      const double p = std::exp(score.value - lse.at(r)), ds = p * (dp.value - delta.value);
      const double ds_magnitude = p * (dp.magnitude + delta.magnitude);
      worst = std::max(worst, std::expm1(gamma(terms) * (score.magnitude + std::fabs(lse.at(r)))));
      for (int64_t d = 0; d < dim; ++d) {
        row[static_cast<size_t>(d)].add(ds * k.at(n * dim + d) * scale,
                                        ds_magnitude * std::fabs(k.at(n * dim + d)) * scale);
        all_dk[static_cast<size_t>(n * dim + d)].add(ds * q.at(r * dim + d) * scale,
                                                     ds_magnitude * std::fabs(q.at(r * dim + d)) * scale);
      }
      for (int64_t e = 0; e < value_dim; ++e) {
        all_dv[static_cast<size_t>(n * value_dim + e)].add(p * dout.at(r * value_dim + e));
      }
    }
    for (int64_t d = 0; d < dim; ++d) {
      const Sum& wanted = row[static_cast<size_t>(d)];
      const double bound = wanted.magnitude * (worst + gamma(2 * terms));
      const double rounding = dtype == DType::kFloat32 ? 0 : unit(dtype) * (std::fabs(wanted.value) + bound);
      expect_close(dq.at(r * dim + d), wanted.value, bound + rounding + tiny(dtype), "dq");
    }
  }
  const auto compare = [&](const Tensor& found, const Tensor& before, const std::vector<Sum>& sums, const char* what) {
    for (size_t n = 0; n < sums.size(); ++n) {
      const double had = before.at(static_cast<int64_t>(n));
      const double bound = (sums[n].magnitude + std::fabs(had)) * (worst + gamma(2 * terms));
      expect_close(found.at(static_cast<int64_t>(n)), had + sums[n].value, bound + tiny(DType::kFloat32), what);
    }
  };
  compare(dk, dk_before, all_dk, "dk");
  compare(dv, dv_before, all_dv, "dv");
  expect(dq.guard_is_intact() && dk.guard_is_intact() && dv.guard_is_intact(), "writes past the end of a gradient");
}

void every_shape(const KernelTable& kernels, std::mt19937& random) {
  const int64_t most = kernels.attention_rows;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const Shape& shape : {Shape{1, 70, 64, 64}, Shape{3, 65, 17, 9}, Shape{most / 2, 130, 24, 8},
                               Shape{most - 1, 77, 19, 21}, Shape{most, 64, 8, 32}, Shape{most, 200, 80, 96}}) {
      for (const int64_t window : {0, 5, 90}) gradients(kernels, random, shape, dtype, window, window == 5);
    }
  }
}

}  // namespace

const std::vector<Test> kAttentionBackwardTests = {{"every shape", every_shape}};

}  // namespace kernel_pytorch::testing
