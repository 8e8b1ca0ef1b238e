// Norms, softmax and reductions.
#include <algorithm>

#include "testing.h"

namespace kernel_pytorch::testing {
namespace {

constexpr int64_t kRows = 5;
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
const std::vector<int64_t> kColumns = {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 257};

// The output of a row op: the float32 result within `bound`, rounded to the dtype.
void expect_rounded(const Tensor& y, int64_t n, double wanted, double bound, const std::string& what) {
  const double rounding = y.dtype() == DType::kFloat32 ? 0 : unit(y.dtype()) * (std::fabs(wanted) + bound);
  expect_close(y.at(n), wanted, bound + rounding + tiny(y.dtype()), what + " of " + name_of(y.dtype()));
}

void norms(const KernelTable& kernels, std::mt19937& random) {
  for (const int64_t count : kColumns) {
    for (const DType dtype : kDTypes) {
      for (const bool subtract_mean : {false, true}) {
        for (const bool affine : {false, true}) {
          Tensor x(dtype, kRows * count, random, 3), y(dtype, kRows * count);
          Tensor weight(dtype, count, random), bias(DType::kFloat32, count, random),
              scratch(DType::kFloat32, 3 * count);
          const View weight_view = view(weight, {count}), bias_view = view(bias, {count});
          NormTask task = {view(x, {kRows, count}), view(y, {kRows, count}), nullptr, nullptr, 1e-5f, subtract_mean};
          if (affine) task.weight = &weight_view;
          if (affine && subtract_mean) task.bias = &bias_view;
          kernels.norm(task, 0, 2, scratch.floats());
          kernels.norm(task, 2, kRows, scratch.floats());
          const double n = static_cast<double>(count);
          for (int64_t row = 0; row < kRows; ++row) {
            const auto element = [&](int64_t c) { return x.at(row * count + c); };
            double mean = 0, magnitude = 0;
            for (int64_t c = 0; c < count; ++c) mean += element(c) / n, magnitude += std::fabs(element(c)) / n;
            const double mean_error = subtract_mean ? gamma(n + 1) * magnitude : 0;
            if (!subtract_mean) mean = 0;
            const auto deviation_error = [&](int64_t c) { return mean_error + kUnit * std::fabs(element(c) - mean); };
            double variance = 0, variance_error = 0;
            for (int64_t c = 0; c < count; ++c) {
              const double d = element(c) - mean, e = deviation_error(c);
              variance += d * d / n;
              variance_error += (2 * std::fabs(d) * e + e * e) / n;
            }
            const double total = variance + static_cast<double>(task.eps);
            variance_error += gamma(n + 3) * (total + variance_error);
            const double scale = 1 / std::sqrt(total);
            // sqrt(total - error) bounds the scale from above; add the roundings of sqrt and of the division.
            const double scale_error =
                1 / std::sqrt(total - std::min(variance_error, total / 2)) - scale + 3 * kUnit * scale;
            for (int64_t c = 0; c < count; ++c) {
              const double d = element(c) - mean, w = affine ? weight.at(c) : 1;
              const double b = task.bias ? bias.at(c) : 0, wanted = d * scale * w + b;
              const double bound =
                  std::fabs(w) * (deviation_error(c) * (scale + scale_error) + std::fabs(d) * scale_error) +
                  gamma(4) * (std::fabs(d * scale * w) + std::fabs(b));
              expect_rounded(y, row * count + c, wanted, bound, "norm");
            }
          }
          expect(y.guard_is_intact(), "writes past the end of y");
        }
      }
    }
  }
}

void softmax(const KernelTable& kernels, std::mt19937& random) {
  for (const int64_t count : kColumns) {
    for (const DType dtype : kDTypes) {
      Tensor x(dtype, kRows * count, random, 20), y(dtype, kRows * count), scratch(DType::kFloat32, count);
      kernels.softmax({view(x, {kRows, count}), view(y, {kRows, count})}, 0, kRows, scratch.floats());
      for (int64_t row = 0; row < kRows; ++row) {
        double max = -INFINITY, total = 0, total_error = 0;
        for (int64_t c = 0; c < count; ++c) max = std::max(max, x.at(row * count + c));
        // exp within 2 ulp, of an argument that is rounded once.
        const auto relative = [&](int64_t c) { return std::expm1(kUnit * (max - x.at(row * count + c))) + 4 * kUnit; };
        for (int64_t c = 0; c < count; ++c) {
          const double e = std::exp(x.at(row * count + c) - max);
          total += e;
          total_error += e * relative(c);
        }
        const double sum_error = total_error / total + gamma(static_cast<double>(count));
        for (int64_t c = 0; c < count; ++c) {
          const double wanted = std::exp(x.at(row * count + c) - max) / total;
          expect_rounded(y, row * count + c, wanted, wanted * (relative(c) + sum_error + gamma(4)), "softmax");
        }
      }
      expect(y.guard_is_intact(), "writes past the end of y");
    }
  }
}

void reductions(const KernelTable& kernels, std::mt19937& random) {
  using format::Reduction;
  for (const int64_t count : kColumns) {
    for (const DType dtype : kDTypes) {
      Tensor x(dtype, kRows * count, random, 4), scratch(DType::kFloat32, count);
      for (const Reduction reduction : {Reduction::kSum, Reduction::kMean, Reduction::kMaximum}) {
        Tensor y(dtype, kRows);
        kernels.reduce({view(x, {kRows, count}), view(y, {kRows, 1})}, reduction, 0, kRows, scratch.floats());
        for (int64_t row = 0; row < kRows; ++row) {
          double sum = 0, magnitude = 0, max = -INFINITY;
          for (int64_t c = 0; c < count; ++c) {
            const double element = x.at(row * count + c);
            sum += element, magnitude += std::fabs(element), max = std::max(max, element);
          }
          const double n = reduction == Reduction::kMean ? static_cast<double>(count) : 1;
          if (reduction == Reduction::kMaximum) {
            expect_close(y.at(row), max, 0, "maximum");
          } else {
            expect_rounded(y, row, sum / n, gamma(static_cast<double>(count) + 1) * magnitude / n, "sum or mean");
          }
        }
      }
    }
  }
  // A row that holds NaN has the maximum NaN, wherever it is.
  for (int64_t place = 0; place < 37; ++place) {
    Tensor x(DType::kFloat32, 37, random), y(DType::kFloat32, 1), scratch(DType::kFloat32, 37);
    x.set(place, NAN);
    kernels.reduce({view(x, {1, 37}), view(y, {1, 1})}, Reduction::kMaximum, 0, 1, scratch.floats());
    expect(std::isnan(y.at(0)), "maximum of a row with NaN at " + std::to_string(place));
  }
}

// A transposed input: its rows are columns in memory.
void strided_rows(const KernelTable& kernels, std::mt19937& random) {
  constexpr int64_t kCount = 19;
  Tensor x(DType::kFloat16, kRows * kCount, random), y(DType::kFloat32, kRows * kCount);
  Tensor scratch(DType::kFloat32, kCount);
  View in = view(x, {kRows, kCount});
  in.strides[0] = 1, in.strides[1] = kRows;
  kernels.softmax({in, view(y, {kRows, kCount})}, 0, kRows, scratch.floats());
  for (int64_t row = 0; row < kRows; ++row) {
    double total = 0;
    for (int64_t c = 0; c < kCount; ++c) total += std::exp(x.at(c * kRows + row));
    for (int64_t c = 0; c < kCount; ++c) {
      const double wanted = std::exp(x.at(c * kRows + row)) / total;
      expect_close(y.at(row * kCount + c), wanted, wanted * gamma(kCount + 30), "softmax of columns");
    }
  }
}

// Rows that lie as columns in memory are read together, and give what they give one by one.
void norms_of_columns(const KernelTable& kernels, std::mt19937& random) {
  constexpr int64_t kBatch = 2, kHeight = 21, kCount = 19, kAll = kBatch * kHeight;
  for (const DType dtype : kDTypes) {
    Tensor x(dtype, kAll * kCount, random), y(dtype, kAll * kCount), wanted(dtype, kAll * kCount);
    Tensor scratch(DType::kFloat32, (kNormRows + 2) * kCount), bias(DType::kFloat32, kCount, random);
    const View bias_view = view(bias, {kCount});
    View in = view(x, {kBatch, kHeight, kCount});
    in.strides[1] = 1, in.strides[2] = kHeight;
    NormTask task = {in, view(wanted, {kBatch, kHeight, kCount}), nullptr, &bias_view, 1e-5f, true};
    for (int64_t row = 0; row < kAll; ++row) kernels.norm(task, row, row + 1, scratch.floats());
    task.out = view(y, {kBatch, kHeight, kCount});
    task.rows_at_once = kNormRows;
    kernels.norm(task, 0, 3, scratch.floats());
    kernels.norm(task, 3, kAll, scratch.floats());
    for (int64_t n = 0; n < kAll * kCount; ++n) expect_close(y.at(n), wanted.at(n), 0, "norm of columns");
    expect(y.guard_is_intact() && scratch.guard_is_intact(), "writes past the end");
  }
}

}  // namespace

const std::vector<Test> kRowTests = {{"norms", norms},
                                     {"softmax", softmax},
                                     {"reductions", reductions},
                                     {"strided rows", strided_rows},
                                     {"norms of columns", norms_of_columns}};

}  // namespace kernel_pytorch::testing
