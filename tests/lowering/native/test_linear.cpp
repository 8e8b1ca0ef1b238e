#include "testing.h"

namespace kernel_pytorch::testing {
namespace {

using format::kPanel;

// Rows of x that are not contiguous with each other, all panels, with and without bias and scales.
void linear(const KernelTable& kernels, std::mt19937& random, DType dtype) {
  for (const int64_t rows : {1, 3, 4, 5, 12, 13, 29, 192}) {
    for (const auto& [inputs, outputs] : {std::pair<int64_t, int64_t>{1, 1}, {7, 33}, {64, 31}, {200, 64}, {2055, 5}}) {
      const int64_t panels = (outputs + kPanel - 1) / kPanel;
      Tensor x(DType::kFloat32, rows * (inputs + 3), random), y(DType::kFloat32, rows * outputs);
      Tensor weights(dtype, panels * inputs * kPanel, random, 0.5), scratch(DType::kFloat32, inputs * kPanel);
      Tensor bias(DType::kFloat32, outputs, random), scales(DType::kFloat32, outputs, random);
      const bool biased = rows % 2 == 1, scaled = dtype == DType::kInt8;
      LinearTask task = {};
      task.dtype = dtype;
      task.rows = rows;
      task.inputs = inputs;
      task.outputs = outputs;
      task.bias = biased ? bias.floats() : nullptr;
      task.scales = scaled ? scales.floats() : nullptr;
      for (int64_t r = 0; r < rows; ++r) {
        task.x[r] = x.floats() + r * (inputs + 3);
        task.y[r] = y.floats() + r * outputs;
      }
      for (task.panel = 0; task.panel < panels; ++task.panel) {
        const int64_t offset = task.panel * inputs * kPanel;
        task.weights = weights.data() + offset * static_cast<int64_t>(size_of(dtype));
        kernels.linear(task, scratch.floats());
      }
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < outputs; ++o) {
          double sum = 0, magnitude = 0;
          for (int64_t i = 0; i < inputs; ++i) {
            const double product =
                x.at(r * (inputs + 3) + i) * weights.at((o / kPanel * inputs + i) * kPanel + o % kPanel);
            sum += product;
            magnitude += std::fabs(product);
          }
          const double scale = scaled ? scales.at(o) : 1, shift = biased ? bias.at(o) : 0;
          const double bound =
              gamma(static_cast<double>(inputs) + 2) * (magnitude * std::fabs(scale) + std::fabs(shift));
          expect_close(y.at(r * outputs + o), sum * scale + shift, bound,
                       std::to_string(rows) + "x" + std::to_string(inputs) + "x" + std::to_string(outputs));
        }
      }
      expect(y.guard_is_intact(), "writes past the end of y");
    }
  }
}

}  // namespace

const std::vector<Test> kLinearTests = {
    {"linear float32", [](const KernelTable& k, std::mt19937& r) { linear(k, r, DType::kFloat32); }},
    {"linear float16", [](const KernelTable& k, std::mt19937& r) { linear(k, r, DType::kFloat16); }},
    {"linear bfloat16", [](const KernelTable& k, std::mt19937& r) { linear(k, r, DType::kBFloat16); }},
    {"linear int8", [](const KernelTable& k, std::mt19937& r) { linear(k, r, DType::kInt8); }},
};

}  // namespace kernel_pytorch::testing
