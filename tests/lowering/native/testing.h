// Tools of the kernel tests: random tensors in every dtype, and comparisons with a double-precision reference.
//
// A reference is computed in double from the exact values of the stored operands. Its error bound is derived from the
// float32 operations of any reasonable kernel, in any order of accumulation: gamma(n) bounds n roundings.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/table.h"

namespace kernel_pytorch::testing {

constexpr double kUnit = 0x1p-24;  // unit roundoff of float32
inline double gamma(double n) { return n * kUnit / (1 - n * kUnit); }

// Unit roundoff of an output dtype, and its smallest subnormal.
double unit(DType dtype);
double tiny(DType dtype);

// Elements of one dtype in memory, filled at random or with a poison that reads as NaN; four poisoned elements follow.
class Tensor {
 public:
  Tensor(DType dtype, int64_t count);  // poisoned
  Tensor(DType dtype, int64_t count, std::mt19937& random, double scale = 1.0);

  double at(int64_t n) const;
  char* data() { return bytes_.data(); }
  const char* data() const { return bytes_.data(); }
  float* floats() { return reinterpret_cast<float*>(bytes_.data()); }
  DType dtype() const { return dtype_; }
  void set(int64_t n, float value);  // float32, bool and int8 only
  bool guard_is_intact() const;

 private:
  DType dtype_;
  int64_t count_;
  std::vector<char> bytes_;
};

// A contiguous view of a tensor.
View view(Tensor& tensor, std::vector<int64_t> dims);

// Records a failure unless |found - wanted| <= bound. NaN is equal to NaN.
void expect_close(double found, double wanted, double bound, const std::string& what);
void expect(bool condition, const std::string& what);

struct Test {
  const char* name;
  void (*run)(const KernelTable& kernels, std::mt19937& random);
};
extern const std::vector<Test> kAttentionTests, kAttentionBackwardTests, kCacheTests, kLinearTests, kPointwiseTests,
    kQuantizedLinearTests, kRowTests;

}  // namespace kernel_pytorch::testing
