// Runs all kernel tests on every table that the processor supports; prints failures and exits with their number.
#include <cstdio>

#include "testing.h"

namespace kernel_pytorch::testing {
namespace {

std::string context;
int failures = 0;
long comparisons = 0;

float half_to_float(uint16_t bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa ? NAN : static_cast<float>(sign * INFINITY);
  const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
  return static_cast<float>(sign * magnitude);
}

float bfloat_to_float(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// The nearest float16 or bfloat16 of a moderate number, found by bisection over its bit patterns.
uint16_t nearest(double value, float (*decode)(uint16_t), uint16_t infinity) {
  uint16_t low = 0, high = infinity;
  const double magnitude = std::fabs(value);
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (decode(middle) <= magnitude ? low : high) = middle;
  }
  const double down = magnitude - decode(low), up = decode(high) - magnitude;
  const bool take_high = up < down || (up == down && high % 2 == 0);
  return static_cast<uint16_t>((take_high ? high : low) | (value < 0 ? 0x8000 : 0));
}

void fail(const std::string& what) {
  ++failures;
  if (failures <= 20) std::printf("FAILED %s: %s\n", context.c_str(), what.c_str());
}

}  // namespace

double unit(DType dtype) { return dtype == DType::kFloat16 ? 0x1p-11 : dtype == DType::kBFloat16 ? 0x1p-8 : kUnit; }

double tiny(DType dtype) { return dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-126; }

Tensor::Tensor(DType dtype, int64_t count)
    : dtype_(dtype), count_(count), bytes_(static_cast<size_t>(count + 4) * size_of(dtype), static_cast<char>(0xff)) {}

Tensor::Tensor(DType dtype, int64_t count, std::mt19937& random, double scale) : Tensor(dtype, count) {
  std::normal_distribution<double> normal(0, scale);
  std::uniform_int_distribution<int> bytes(-127, 127);
  for (int64_t n = 0; n < count; ++n) {
    if (dtype == DType::kFloat32) {
      set(n, static_cast<float>(normal(random)));
    } else if (dtype == DType::kInt8 || dtype == DType::kBool) {
      set(n, static_cast<float>(dtype == DType::kInt8 ? bytes(random) : bytes(random) > 0));
    } else {
      const bool half = dtype == DType::kFloat16;
      const uint16_t bits =
          nearest(normal(random), half ? half_to_float : bfloat_to_float, half ? uint16_t{0x7c00} : uint16_t{0x7f80});
      std::memcpy(bytes_.data() + n * 2, &bits, 2);
    }
  }
}

void Tensor::set(int64_t n, float value) {
  if (dtype_ == DType::kFloat32) {
    std::memcpy(bytes_.data() + n * 4, &value, 4);
  } else {
    bytes_[static_cast<size_t>(n)] = static_cast<char>(value);
  }
}

double Tensor::at(int64_t n) const {
  const char* const p = bytes_.data() + n * static_cast<int64_t>(size_of(dtype_));
  float value;
  uint16_t bits;
  switch (dtype_) {
    case DType::kFloat32:
      std::memcpy(&value, p, 4);
      return value;
    case DType::kFloat16:
    case DType::kBFloat16:
      std::memcpy(&bits, p, 2);
      return dtype_ == DType::kFloat16 ? half_to_float(bits) : bfloat_to_float(bits);
    default:
      return static_cast<signed char>(*p);
  }
}

bool Tensor::guard_is_intact() const {
  const size_t end = static_cast<size_t>(count_) * size_of(dtype_);
  for (size_t n = end; n < bytes_.size(); ++n) {
    if (bytes_[n] != static_cast<char>(0xff)) return false;
  }
  return true;
}

View view(Tensor& tensor, std::vector<int64_t> dims) {
  View result;
  result.data = tensor.data();
  result.dtype = tensor.dtype();
  result.rank = static_cast<int32_t>(dims.size());
  int64_t stride = 1;
  for (int d = result.rank - 1; d >= 0; --d) {
    result.dims[d] = dims[static_cast<size_t>(d)];
    result.strides[d] = stride;
    stride *= result.dims[d];
  }
  return result;
}

void expect_close(double found, double wanted, double bound, const std::string& what) {
  ++comparisons;
  if (std::isnan(wanted) ? std::isnan(found) : found == wanted || std::fabs(found - wanted) <= bound) return;
  char text[160];
  std::snprintf(text, sizeof(text), "%.9g instead of %.9g, off by %.3g; the bound is %.3g", found, wanted,
                std::fabs(found - wanted), bound);
  fail(what + ": " + text);
}

void expect(bool condition, const std::string& what) {
  ++comparisons;
  if (!condition) fail(what);
}

int run_all() {
  const KernelTable* tables[kMaxTables];
  const int count = available_kernels(tables);
  for (int n = 0; n < count; ++n) {
    for (const auto* suite : {&kAttentionTests, &kAttentionBackwardTests, &kCacheTests, &kLinearTests, &kPointwiseTests,
                              &kQuantizedLinearTests, &kRowTests}) {
      for (const Test& test : *suite) {
        context = std::string(tables[n]->name) + " " + test.name;
        std::mt19937 random(1);  // the same operands for every table
        const long before = comparisons;
        test.run(*tables[n], random);
        if (comparisons == before) fail("compared nothing");
      }
    }
    std::printf("%s: ", tables[n]->name);
  }
  std::printf("%ld comparisons, %d failures\n", comparisons, failures);
  return failures > 0 ? 1 : 0;
}

}  // namespace kernel_pytorch::testing

int main() { return kernel_pytorch::testing::run_all(); }
