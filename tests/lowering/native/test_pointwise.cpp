#include "testing.h"

namespace kernel_pytorch::testing {
namespace {

using format::kRegisters;
using format::Step;

struct Operand {
  Tensor* tensor;
  std::vector<int64_t> strides;
};

// Runs steps over `dims` with contiguous float32 output in register 2, in tiles where `across` is a dimension.
Tensor run(const KernelTable& kernels, const std::vector<int64_t>& dims, const std::vector<Operand>& inputs,
           const std::vector<int64_t>& steps, const std::vector<float>& immediates = {}, int across = -1) {
  PointwiseLoop loop = {};
  loop.rank = static_cast<int32_t>(dims.size());
  loop.inputs = static_cast<int32_t>(inputs.size());
  loop.outputs = 1;
  int64_t elements = 1, rows = 1;
  for (int d = loop.rank - 1; d >= 0; --d) {
    const auto n = static_cast<size_t>(d);
    loop.dims[d] = dims[n];
    loop.out_strides[0][d] = elements;
    for (size_t i = 0; i < inputs.size(); ++i) loop.in_strides[i][d] = inputs[i].strides[n];
    elements *= dims[n];
    rows *= d < loop.rank - 1 ? dims[n] : 1;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    loop.in[i] = inputs[i].tensor->data();
    loop.in_dtype[i] = inputs[i].tensor->dtype();
  }
  Tensor out(DType::kFloat32, elements), scratch(DType::kFloat32, kRegisters * kPointwiseChunk);
  const int64_t out_register = 2, chunks = (dims.back() + kPointwiseChunk - 1) / kPointwiseChunk;
  loop.out[0] = out.data();
  loop.out_dtype[0] = DType::kFloat32;
  loop.steps = steps.data();
  loop.step_count = static_cast<int64_t>(steps.size() / 4);
  loop.out_registers = &out_register;
  loop.immediates = immediates.data();
  loop.tiled = across >= 0;
  loop.across = across;
  const auto tiles = [](int64_t size) { return (size + kPointwiseTile - 1) / kPointwiseTile; };
  const int64_t height = loop.tiled ? loop.dims[across] : 1;
  const int64_t tasks = loop.tiled ? rows / height * tiles(height) * tiles(dims.back()) : rows * chunks;
  kernels.pointwise(loop, 0, tasks, scratch.floats());
  expect(out.guard_is_intact(), "writes past the end of the output");
  return out;
}

constexpr int64_t number(Step step) { return static_cast<int64_t>(step); }

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Unary {
  Step step;
  double (*function)(double);
  bool positive;  // only defined for positive arguments
};

const Unary kUnary[] = {
    {Step::kCopy, [](double x) { return x; }, false},
    {Step::kNegate, [](double x) { return -x; }, false},
    {Step::kAbsolute, [](double x) { return std::fabs(x); }, false},
    {Step::kExp, [](double x) { return std::exp(x); }, false},
    {Step::kLog, [](double x) { return std::log(x); }, true},
    {Step::kSqrt, [](double x) { return std::sqrt(x); }, true},
    {Step::kRsqrt, [](double x) { return 1 / std::sqrt(x); }, true},
    {Step::kReciprocal, [](double x) { return 1 / x; }, true},
    {Step::kSigmoid, sigmoid, false},
    {Step::kTanh, [](double x) { return std::tanh(x); }, false},
    {Step::kErf, [](double x) { return std::erf(x); }, false},
    {Step::kSilu, [](double x) { return x * sigmoid(x); }, false},
    {Step::kGelu, [](double x) { return 0.5 * x * std::erfc(-x * M_SQRT1_2); }, false},
    {Step::kGeluTanh, [](double x) { return x * sigmoid(2 * std::sqrt(M_2_PI) * (x + 0.044715 * x * x * x)); }, false},
    {Step::kRelu, [](double x) { return x > 0 ? x : 0; }, false},
    {Step::kSin, [](double x) { return std::sin(x); }, false},
    {Step::kCos, [](double x) { return std::cos(x); }, false},
};

// Eight roundings, and the effect of rounding an argument a few times: of the condition number |x f'(x) / f(x)|, or of
// the slope where f is zero.
double bound_of(const Unary& unary, double x, double wanted) {
  const double h = 1e-6 * (std::fabs(x) + 1e-3);
  const double low = unary.positive ? std::fmax(x - h, x / 2) : x - h;
  const double slope = (unary.function(x + h) - unary.function(low)) / (x + h - low);
  return kUnit * (8 * std::fabs(wanted) + 8 * std::fabs(x * slope) + 2 * std::fmin(std::fabs(slope), 1.0)) + 0x1p-126;
}

void unary_steps(const KernelTable& kernels, std::mt19937& random) {
  constexpr int64_t kCount = 1003;  // several chunks, and a last one that is not whole vectors
  Tensor x(DType::kFloat32, kCount, random, 6), positive(DType::kFloat32, kCount, random, 6);
  for (int64_t n = 0; n < kCount; ++n) positive.set(n, std::fabs(static_cast<float>(positive.at(n))) + 1e-6f);
  x.set(0, 0), x.set(1, -200), x.set(2, 200), x.set(3, 1e-30f), x.set(4, -88);
  for (const Unary& unary : kUnary) {
    Tensor& in = unary.positive ? positive : x;
    const Tensor y = run(kernels, {kCount}, {{&in, {1}}}, {number(unary.step), 2, 0, 0});
    for (int64_t n = 0; n < kCount; ++n) {
      const double wanted = unary.function(in.at(n));
      const bool overflows = std::fabs(wanted) > 3.4028235e38;
      expect_close(y.at(n), overflows ? INFINITY : wanted, overflows ? 0 : bound_of(unary, in.at(n), wanted),
                   "step " + std::to_string(number(unary.step)) + " of " + std::to_string(in.at(n)));
    }
  }
}

void binary_steps(const KernelTable& kernels, std::mt19937& random) {
  constexpr int64_t kCount = 300;
  Tensor a(DType::kFloat32, kCount, random, 3), b(DType::kFloat32, kCount, random, 3);
  const std::pair<Step, double (*)(double, double)> steps[] = {
      {Step::kAdd, [](double p, double q) { return p + q; }},
      {Step::kSubtract, [](double p, double q) { return p - q; }},
      {Step::kMultiply, [](double p, double q) { return p * q; }},
      {Step::kDivide, [](double p, double q) { return p / q; }},
      {Step::kMaximum, [](double p, double q) { return std::fmax(p, q); }},
      {Step::kMinimum, [](double p, double q) { return std::fmin(p, q); }},
      {Step::kPower, [](double p, double q) { return std::pow(p, q); }},
  };
  for (const auto& [step, function] : steps) {
    const Tensor y = run(kernels, {kCount}, {{&a, {1}}, {&b, {1}}}, {number(step), 2, 0, 1});
    for (int64_t n = 0; n < kCount; ++n) {
      const double wanted = function(a.at(n), b.at(n));
      expect_close(y.at(n), wanted, 4 * kUnit * std::fabs(wanted) + 0x1p-126, "step " + std::to_string(number(step)));
    }
  }
  a.set(7, NAN), b.set(9, NAN);
  for (const Step step : {Step::kMaximum, Step::kMinimum}) {
    const Tensor y = run(kernels, {kCount}, {{&a, {1}}, {&b, {1}}}, {number(step), 2, 0, 1});
    expect(std::isnan(y.at(7)) && std::isnan(y.at(9)) && !std::isnan(y.at(8)), "NaN of either operand propagates");
  }
}

// x * mask + 2.5 over three dimensions: x is transposed and in bfloat16, mask is bool and broadcast.
void chain_over_views(const KernelTable& kernels, std::mt19937& random) {
  constexpr int64_t kA = 3, kB = 5, kC = 270;
  Tensor x(DType::kBFloat16, kA * kB * kC, random), mask(DType::kBool, kA * kC, random);
  const Tensor y =
      run(kernels, {kA, kB, kC}, {{&x, {kB * kC, 1, kB}}, {&mask, {kC, 0, 1}}},
          {number(Step::kMultiply), 3, 0, 1, number(Step::kImmediate), 4, 0, 0, number(Step::kAdd), 2, 3, 4}, {2.5f});
  for (int64_t a = 0; a < kA; ++a) {
    for (int64_t b = 0; b < kB; ++b) {
      for (int64_t c = 0; c < kC; ++c) {
        const double wanted = x.at(a * kB * kC + b + c * kB) * mask.at(a * kC + c) + 2.5;
        expect_close(y.at((a * kB + b) * kC + c), wanted, 2 * kUnit * (std::fabs(wanted) + 2.5), "chain");
      }
    }
  }
}

// A transposed tensor in each dtype plus a broadcast one, in tiles that the sizes do not fill.
void tiles(const KernelTable& kernels, std::mt19937& random) {
  constexpr int64_t kA = 3, kB = 37, kC = 21;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBool}) {
    Tensor x(dtype, kA * kB * kC, random), row(DType::kFloat32, kC, random);
    const Tensor y =
        run(kernels, {kA, kB, kC}, {{&x, {kB * kC, 1, kB}}, {&row, {0, 0, 1}}}, {number(Step::kAdd), 2, 0, 1}, {}, 1);
    for (int64_t a = 0; a < kA; ++a) {
      for (int64_t b = 0; b < kB; ++b) {
        for (int64_t c = 0; c < kC; ++c) {
          const double wanted = x.at(a * kB * kC + b + c * kB) + row.at(c);
          expect_close(y.at((a * kB + b) * kC + c), wanted, kUnit * std::fabs(wanted), "tile");
        }
      }
    }
  }
}

}  // namespace

const std::vector<Test> kPointwiseTests = {{"unary steps", unary_steps},
                                           {"binary steps", binary_steps},
                                           {"chain over views", chain_over_views},
                                           {"tiles", tiles}};

}  // namespace kernel_pytorch::testing
