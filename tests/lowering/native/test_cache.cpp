#include <algorithm>

#include "testing.h"

namespace kernel_pytorch::testing {
namespace {

CacheRow row_of(Tensor& from, int64_t stride, int64_t count, Tensor& to, float* scale) {
  return {from.data(), from.dtype(), to.dtype(), stride, count, to.data(), scale};
}

void float_rows(const KernelTable& kernels, std::mt19937& random) {
  for (const int64_t count : {1, 7, 16, 33, 128}) {
    for (const int64_t stride : {1, 3}) {
      Tensor from(DType::kFloat32, count * stride, random), scratch(DType::kFloat32, count);
      Tensor same(DType::kFloat32, count), half(DType::kFloat16, count);
      kernels.cache_row(row_of(from, stride, count, same, nullptr), scratch.floats());
      kernels.cache_row(row_of(from, stride, count, half, nullptr), scratch.floats());
      for (int64_t n = 0; n < count; ++n) {
        const double wanted = from.at(n * stride);
        expect_close(same.at(n), wanted, 0, "float32 row");
        const double bound = unit(DType::kFloat16) * std::fabs(wanted) + tiny(DType::kFloat16) / 2;
        expect_close(half.at(n), wanted, bound, "float16 row");
      }
      expect(same.guard_is_intact() && half.guard_is_intact(), "writes past the end of the row");
    }
  }
}

// Symmetric quantization with the scale amax / 127, rounded to nearest.
void int8_rows(const KernelTable& kernels, std::mt19937& random) {
  for (const int64_t count : {1, 5, 16, 40, 128}) {
    Tensor from(DType::kFloat32, count, random, 7), to(DType::kInt8, count), scratch(DType::kFloat32, count);
    float scale = NAN;
    kernels.cache_row(row_of(from, 1, count, to, &scale), scratch.floats());
    double amax = 0;
    for (int64_t n = 0; n < count; ++n) amax = std::max(amax, std::fabs(from.at(n)));
    const double step = static_cast<double>(scale);
    expect_close(step, amax / 127, kUnit * amax / 127, "scale");
    for (int64_t n = 0; n < count; ++n) {
      expect(std::fabs(to.at(n)) <= 127, "quantized data out of range");
      expect_close(to.at(n) * step, from.at(n), step * (0.5 + 128 * kUnit), "dequantized element");
    }
    expect(to.guard_is_intact(), "writes past the end of the row");
  }
}

void special_rows(const KernelTable& kernels, std::mt19937& random) {
  for (const float special : {0.0f, NAN, INFINITY}) {
    Tensor from(DType::kFloat32, 9, random), to(DType::kInt8, 9), scratch(DType::kFloat32, 9);
    for (int64_t n = 0; n < 9; ++n) from.set(n, special == 0 || n == 4 ? special : 1.0f);
    float scale = 1;
    kernels.cache_row(row_of(from, 1, 9, to, &scale), scratch.floats());
    expect_close(static_cast<double>(scale), static_cast<double>(special), 0, "scale of a special row");
    for (int64_t n = 0; n < 9; ++n) expect(to.at(n) == 0, "data of a special row");
  }
}

}  // namespace

const std::vector<Test> kCacheTests = {
    {"float rows", float_rows}, {"int8 rows", int8_rows}, {"zero, NaN and infinity", special_rows}};

}  // namespace kernel_pytorch::testing
