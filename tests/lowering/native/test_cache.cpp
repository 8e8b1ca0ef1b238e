#include <algorithm>
#include <cstring>

#include "core/cache.h"
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

std::shared_ptr<Cache> cache_of(DType dtype, int64_t window) {
  Reason reason;
  auto cache = Cache::make({"cache", dtype, 2, 3, 5, 4, window + 4, 2, window}, reason);
  expect(cache != nullptr, "no cache was made");
  return cache;
}

// Writes tokens whose every byte says where it is.
void write_tokens(Cache& cache, int64_t from, int64_t to) {
  for (int64_t position = from; position < to; ++position) {
    for (int64_t row = 0; row < 6; ++row) {
      const int64_t at = row * cache.slots() + cache.slot(position);
      const auto width = [&](int64_t dim) { return static_cast<size_t>(dim) * size_of(cache.shape().dtype); };
      std::memset(cache.keys() + static_cast<size_t>(at) * width(5), static_cast<int>(position * 7 + row), width(5));
      std::memset(cache.values() + static_cast<size_t>(at) * width(4), static_cast<int>(position * 5 + row), width(4));
      if (cache.key_scales() != nullptr) {
        cache.key_scales()[at] = static_cast<float>(position);
        cache.value_scales()[at] = static_cast<float>(row);
      }
    }
    cache.advance(position, 1);
  }
}

// A history before and after the ring has wrapped around, taken over by another cache.
void saved_histories(const KernelTable& /*kernels*/, std::mt19937& /*random*/) {
  for (const DType dtype : {DType::kFloat32, DType::kInt8}) {
    for (const int64_t tokens : {0, 1, 5, 10, 11, 40}) {
      const auto first = cache_of(dtype, 4), second = cache_of(dtype, 4);
      write_tokens(*first, 0, tokens);
      write_tokens(*second, 0, 3);
      std::vector<char> saved(first->saved_bytes());
      first->save(saved.data());
      Reason reason;
      expect(second->check_saved(saved.data(), saved.size(), reason) == saved.size(), "a history is refused");
      second->restore(saved.data());
      std::vector<char> again(second->saved_bytes());
      second->save(again.data());
      expect(again == saved, "a history that was taken over differs");
      expect(second->accepts(tokens, 1, reason), "the next position is refused");
      expect(!second->accepts(tokens + 1, 1, reason), "a position past the history is accepted");
      expect(second->check_saved(saved.data(), saved.size() - 1, reason) == 0, "a cut history is accepted");
      expect(cache_of(dtype, 3)->check_saved(saved.data(), saved.size(), reason) == 0, "another shape is accepted");
      for (size_t byte = 0; byte < 8 * 11 && byte < saved.size(); ++byte) {
        std::vector<char> damaged = saved;
        damaged[byte] = static_cast<char>(damaged[byte] ^ 0x80);
        const size_t size = second->check_saved(damaged.data(), damaged.size(), reason);
        expect(size <= damaged.size(), "a damaged history reaches past its end");
      }
    }
  }
}

}  // namespace

const std::vector<Test> kCacheTests = {{"float rows", float_rows},
                                       {"int8 rows", int8_rows},
                                       {"zero, NaN and infinity", special_rows},
                                       {"saved histories", saved_histories}};

}  // namespace kernel_pytorch::testing
