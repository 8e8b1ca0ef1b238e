// Linears with 4- and 8-bit weights and rows of x that are quantized on the fly.
#include <algorithm>

#include "testing.h"

namespace kernel_pytorch::testing {
namespace {

using format::kPanel;

// A quantized row with its memory.
struct Row {
  Row(int64_t padded, int64_t group)
      : data(static_cast<size_t>(padded), 0xff),
        sums(static_cast<size_t>(padded / group), -1),
        padded(padded),
        group(group) {}

  QuantizedRow record() { return {data.data(), sums.data(), &scale, &zero_point, padded, group}; }

  std::vector<uint8_t> data;
  std::vector<int32_t> sums;
  float scale = NAN;
  int32_t zero_point = -1;
  int64_t padded, group;
};

void quantize_rows(const KernelTable& kernels, std::mt19937& random) {
  for (const int64_t count : {1, 3, 16, 33, 100, 256}) {
    for (const float offset : {0.0f, 5.0f, -5.0f}) {  // mixed, almost all positive, almost all negative
      const int64_t padded = (count + 31) / 32 * 32;
      Tensor x(DType::kFloat32, count, random, 2);
      for (int64_t n = 0; n < count; ++n) x.set(n, static_cast<float>(x.at(n)) + offset);
      Row row(padded, 32);
      kernels.quantize_row(x.floats(), count, row.record());
      double least = 0, greatest = 0;
      for (int64_t n = 0; n < count; ++n) least = std::min(least, x.at(n)), greatest = std::max(greatest, x.at(n));
      const double scale = static_cast<double>(row.scale);
      expect_close(scale, (greatest - least) / 255, gamma(3) * scale, "scale");
      for (int64_t n = 0; n < padded; ++n) {
        const double data = row.data[static_cast<size_t>(n)];
        if (n >= count) {
          expect(data == 0, "padding");
        } else {
          // The zero point is rounded too, so an end of the range may be cut by half a step.
          const bool at_end = data == 0 || data == 255;
          expect_close(scale * (data - row.zero_point), x.at(n), scale * (at_end ? 1.01 : 0.501),
                       "dequantized element");
        }
      }
      for (int64_t group = 0; group < padded / 32; ++group) {
        int32_t total = 0;
        for (int64_t n = 0; n < 32; ++n) total += row.data[static_cast<size_t>(group * 32 + n)];
        expect(row.sums[static_cast<size_t>(group)] == total, "group sum");
      }
    }
  }
  for (const float special : {NAN, INFINITY, -INFINITY}) {
    Tensor x(DType::kFloat32, 64, random);
    x.set(37, special);
    Row row(64, 32);
    kernels.quantize_row(x.floats(), 64, row.record());
    expect(std::isnan(row.scale), "a row that is not finite has the scale NaN");
  }
  Tensor zeros(DType::kFloat32, 32, random, 0);
  Row row(32, 32);
  kernels.quantize_row(zeros.floats(), 32, row.record());
  expect(row.zero_point == 0 && row.data[5] == 0 && row.scale > 0, "a row of zeros");
}

struct Case {
  int64_t rows, inputs, outputs, bits, group;
};

void compare(const KernelTable& kernels, std::mt19937& random, const Case& c, bool extreme) {
  const int64_t step = c.bits == 4 ? 8 : 4, groups = (c.inputs + c.group - 1) / c.group, padded = groups * c.group;
  const int64_t panels = (c.outputs + kPanel - 1) / kPanel, limit = c.bits == 4 ? 7 : 127;
  std::uniform_int_distribution<int> integers(static_cast<int>(-limit - 1), static_cast<int>(limit));
  // weight[o * padded + i], zero where it is padding
  std::vector<int> weight(static_cast<size_t>(panels * kPanel * padded));
  for (int64_t o = 0; o < c.outputs; ++o) {
    for (int64_t i = 0; i < c.inputs; ++i) {
      weight[static_cast<size_t>(o * padded + i)] =
          extreme ? static_cast<int>(o % 2 ? limit : -limit - 1) : integers(random);
    }
  }
  const auto at = [&](int64_t o, int64_t i) { return weight[static_cast<size_t>(o * padded + i)]; };
  Tensor scales(DType::kFloat32, panels * groups * kPanel, random, 0.1), sums(DType::kFloat32, panels * kPanel);
  Tensor bias(DType::kFloat32, c.outputs, random), y(DType::kFloat32, c.rows * c.outputs);
  const auto scale_of = [&](int64_t o, int64_t g) {
    return scales.at((o / kPanel * groups + g) * kPanel + o % kPanel);
  };
  std::vector<char> packed(static_cast<size_t>(panels * padded / step * kPanel * 4));
  for (int64_t o = 0; o < panels * kPanel; ++o) {
    double sum = 0;
    for (int64_t i = 0; i < padded; ++i) {
      const int64_t row = (o / kPanel * padded + i) / step;
      char& byte = packed[static_cast<size_t>((row * kPanel + o % kPanel) * 4 + i % 4)];
      if (c.bits == 8) {
        byte = static_cast<char>(at(o, i));
      } else {
        byte = static_cast<char>(static_cast<unsigned char>(byte) | (at(o, i) + 8) << (i % 8 < 4 ? 0 : 4));
      }
      sum += at(o, i) * scale_of(o, i / c.group);
    }
    sums.set(o, static_cast<float>(sum));
  }
  Tensor x(DType::kFloat32, c.rows * c.inputs, random);
  std::vector<Row> rows;
  QuantizedLinearTask task = {};
  task.rows = c.rows, task.padded = padded, task.group = c.group, task.bits = c.bits;
  rows.reserve(static_cast<size_t>(c.rows));
  for (int64_t r = 0; r < c.rows; ++r) {
    rows.emplace_back(padded, c.group);
    kernels.quantize_row(x.floats() + r * c.inputs, c.inputs, rows.back().record());
    task.x[r] = rows.back().record();
  }
  const bool biased = c.rows % 2 == 1;
  for (int64_t panel = 0; panel < panels; ++panel) {
    task.columns = std::min(kPanel, c.outputs - panel * kPanel);
    for (int64_t r = 0; r < c.rows; ++r) task.y[r] = y.floats() + r * c.outputs + panel * kPanel;
    task.weights = packed.data() + panel * padded / step * kPanel * 4;
    task.scales = scales.floats() + panel * groups * kPanel;
    task.sums = sums.floats() + panel * kPanel;
    task.bias = biased ? bias.floats() + panel * kPanel : nullptr;
    kernels.quantized_linear(task);
  }
  for (int64_t r = 0; r < c.rows; ++r) {
    const Row& row = rows[static_cast<size_t>(r)];
    for (int64_t o = 0; o < c.outputs; ++o) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < c.inputs; ++i) {
        const double product = at(o, i) * scale_of(o, i / c.group);
        sum += product * (row.data[static_cast<size_t>(i)] - row.zero_point);
        magnitude += std::fabs(product) * 255;  // of the data and of the zero point, which are summed apart
      }
      const double scale = static_cast<double>(row.scale), shift = biased ? bias.at(o) : 0;
      const double bound = gamma(static_cast<double>(groups) + 6) * (2 * magnitude * scale + std::fabs(shift));
      expect_close(y.at(r * c.outputs + o), sum * scale + shift, bound,
                   std::to_string(c.bits) + " bits, " + std::to_string(c.rows) + "x" + std::to_string(c.inputs) + "x" +
                       std::to_string(c.outputs) + ", groups of " + std::to_string(c.group));
    }
  }
  expect(y.guard_is_intact(), "writes past the end of y");
}

void quantized_linear(const KernelTable& kernels, std::mt19937& random) {
  for (const int64_t rows : {1, 2, 3, 4, 7, 25, 192}) {
    for (const bool extreme : {false, true}) {
      compare(kernels, random, {rows, 64, 33, 4, 32}, extreme);
      compare(kernels, random, {rows, 256, 64, 4, 128}, extreme);
      compare(kernels, random, {rows, 40, 7, 4, 40}, extreme);
      compare(kernels, random, {rows, 37, 31, 8, 40}, extreme);  // padded
      compare(kernels, random, {rows, 512, 64, 8, 512}, extreme);
      compare(kernels, random, {rows, 96, 32, 8, 32}, extreme);
      compare(kernels, random, {rows, 108, 40, 8, 36}, extreme);  // groups that are no multiple of eight
    }
  }
}

// The largest sum of products, 255 * -128 * 65536, is just above -2^31.
void longest_sums(const KernelTable& kernels, std::mt19937& /*random*/) {
  constexpr int64_t kInputs = 65536;
  std::vector<char> packed(static_cast<size_t>(kInputs * kPanel), -128);
  std::vector<float> x(static_cast<size_t>(kInputs), 1.0f), scales(kPanel, 1.0f), sums(kPanel, -128.0f * kInputs),
      y(kPanel);
  Row row(kInputs, kInputs);
  kernels.quantize_row(x.data(), kInputs, row.record());
  QuantizedLinearTask task = {};
  task.rows = 1, task.padded = task.group = kInputs, task.bits = 8, task.columns = kPanel;
  task.x[0] = row.record(), task.y[0] = y.data();
  task.weights = packed.data(), task.scales = scales.data(), task.sums = sums.data();
  kernels.quantized_linear(task);
  for (const float found : y) {
    expect_close(static_cast<double>(found), -128.0 * kInputs, gamma(8) * 128 * kInputs * 2, "sum");
  }
}

}  // namespace

const std::vector<Test> kQuantizedLinearTests = {
    {"quantize rows", quantize_rows}, {"quantized linear", quantized_linear}, {"longest sums", longest_sums}};

}  // namespace kernel_pytorch::testing
