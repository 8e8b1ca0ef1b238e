// (x, weights, scales, sums, -bias) -> y in float32; ints: bits (4 or 8), inputs of a group.
//
// weights: (panels, steps, 4 kPanel) bytes, see kernels/quantized_linear.h; inputs are padded to a multiple of the
// group. scales: (panels, groups, kPanel). sums: (panels, kPanel), the sum of the dequantized weights of each output.
#include <algorithm>
#include <initializer_list>

#include "operators/registry.h"

namespace kernel_pytorch {
namespace {

using format::kPanel;

constexpr int64_t kMaxInputs = 65536;  // 255 * 128 * kMaxInputs fits in int32
constexpr int64_t kMaxOutputs = int64_t{1} << 32;
constexpr int64_t kRowStep = 12;  // a multiple of the rows of a tile, for every target
constexpr int64_t kRowBytesInCache = 1 << 19;

bool is_contiguous(const View& view) {
  int64_t stride = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    if (view.dims[d] != 1 && view.strides[d] != stride) return false;
    stride *= view.dims[d];
  }
  return true;
}

bool is_packed(const View& view, DType dtype, std::initializer_list<int64_t> dims) {
  return view.dtype == dtype && view.rank == static_cast<int32_t>(dims.size()) &&
         std::equal(dims.begin(), dims.end(), view.dims) && is_contiguous(view);
}

class QuantizedLinear final : public Operator {
 public:
  bool check(LoadContext& /*context*/, Reason& reason) override {
    if (!has_operands(5, 4, 1) || !op->floats.empty() || op->ints.size() != 2) return wrong_operands(reason);
    bits_ = op->ints[0];
    group_ = op->ints[1];
    const int64_t step = bits_ == 4 ? 8 : 4;
    const bool good = (bits_ == 4 || bits_ == 8) && group_ > 0 && group_ <= kMaxInputs && group_ % step == 0;
    return good || reason.set("quantized_linear has %lld bits and groups of %lld inputs", static_cast<long long>(bits_),
                              static_cast<long long>(group_));
  }

  bool resolve(Reason& reason) override {
    const View &x = inputs[0], &y = outputs[0];
    const bool good = x.dtype == DType::kFloat32 && y.dtype == DType::kFloat32 && x.rank >= 1 && y.rank == x.rank &&
                      std::equal(x.dims, x.dims + x.rank - 1, y.dims);
    if (!good) return reason.set("the shapes or dtypes of quantized_linear do not fit each other");
    const int64_t in = x.dims[x.rank - 1], out = y.dims[y.rank - 1], elements = x.numel();
    if (in < 1 || in > kMaxInputs || out < 1 || out > kMaxOutputs) {
      return reason.set("quantized_linear has %lld inputs and %lld outputs; 65536 and 2^32 are the most",
                        static_cast<long long>(in), static_cast<long long>(out));
    }
    if (elements > 0 && (!is_contiguous(x) || !is_contiguous(y))) {
      return reason.set("quantized_linear takes contiguous tensors");
    }
    groups_ = (in + group_ - 1) / group_;
    padded_ = groups_ * group_;
    const int64_t panels = (out + kPanel - 1) / kPanel, steps = padded_ / (bits_ == 4 ? 8 : 4);
    const bool packed = padded_ <= kMaxInputs && is_packed(inputs[1], DType::kInt8, {panels, steps, 4 * kPanel}) &&
                        is_packed(inputs[2], DType::kFloat32, {panels, groups_, kPanel}) &&
                        is_packed(inputs[3], DType::kFloat32, {panels, kPanel}) &&
                        (!has_input[4] || is_packed(inputs[4], DType::kFloat32, {out}));
    if (!packed) return reason.set("the weights of quantized_linear are not packed for its inputs and outputs");

    rows_ = elements / in;
    schedule.workspace_bytes = static_cast<size_t>(rows_) * static_cast<size_t>(row_bytes());
    // As many rows as fit in L2 beside a panel, because each block reads all weights; few enough that every worker
    // gets some.
    rows_per_task_ = std::clamp<int64_t>(kRowBytesInCache / padded_, kRowStep, kMaxQuantizedRows);
    rows_per_task_ = (rows_ / std::max<int64_t>(blocks(), 1) + kRowStep) / kRowStep * kRowStep;  // all about as large
    rows_per_task_ = std::min(rows_per_task_, kMaxQuantizedRows);
    while (rows_per_task_ > kRowStep && blocks() * panels < max_workers * 4) rows_per_task_ -= kRowStep;
    schedule.tasks = blocks() * panels;
    const double products = static_cast<double>(elements) * static_cast<double>(out);
    schedule.workers = products > kParallelElements * 16.0 ? max_workers : 1;
    schedule.start_tasks = schedule.workers > 1 && elements > kParallelElements ? rows_ : 0;
    schedule.tasks_per_claim = std::clamp<int64_t>(schedule.tasks / (schedule.workers * 8), 1, panels);
    return true;
  }

  // Quantizes all rows of x, because every panel reads them: here if they are few.
  void start() override {
    for (int64_t r = schedule.start_tasks; r < rows_; ++r) prepare(r);
  }

  void prepare(int64_t task) const override {
    const int64_t in = inputs[0].dims[inputs[0].rank - 1];
    kernels->quantize_row(reinterpret_cast<const float*>(inputs[0].data) + task * in, in, row(task));
  }

  // A task is a block of rows times one panel. Panels are the inner index, so that a worker streams weights.
  void run(int64_t begin, int64_t end, char* /*scratch*/) const override {
    const int64_t panels = inputs[1].dims[0], out = outputs[0].dims[outputs[0].rank - 1];
    const int64_t panel_bytes = inputs[1].dims[1] * inputs[1].dims[2];
    const auto floats = [&](size_t n) { return reinterpret_cast<const float*>(inputs[n].data); };
    QuantizedLinearTask task;
    task.padded = padded_;
    task.group = group_;
    task.bits = bits_;
    for (int64_t n = begin; n < end; ++n) {
      const int64_t panel = n % panels, first = n / panels * rows_per_task_;
      task.rows = std::min(rows_per_task_, rows_ - first);
      task.columns = std::min(kPanel, out - panel * kPanel);
      for (int64_t r = 0; r < task.rows; ++r) {
        task.x[r] = row(first + r);
        task.y[r] = reinterpret_cast<float*>(outputs[0].data) + (first + r) * out + panel * kPanel;
      }
      task.weights = inputs[1].data + panel * panel_bytes;
      task.scales = floats(2) + panel * groups_ * kPanel;
      task.sums = floats(3) + panel * kPanel;
      task.bias = has_input[4] ? floats(4) + panel * kPanel : nullptr;
      kernels->quantized_linear(task);
    }
  }

  double cost() const override {
    return static_cast<double>(schedule.tasks) * static_cast<double>(rows_per_task_ * kPanel) *
           static_cast<double>(padded_);
  }

 private:
  int64_t blocks() const { return (rows_ + rows_per_task_ - 1) / rows_per_task_; }

  // Of one row in the workspace: data, group sums, scale and zero point. A multiple of 4.
  int64_t row_bytes() const { return padded_ + (groups_ + 2) * 4; }

  QuantizedRow row(int64_t n) const {
    char* const at = workspace + n * row_bytes();
    auto* const sums = reinterpret_cast<int32_t*>(at + padded_);
    return {reinterpret_cast<uint8_t*>(at),
            sums,
            reinterpret_cast<float*>(sums + groups_),
            sums + groups_ + 1,
            padded_,
            group_};
  }

  int64_t bits_ = 8, group_ = 1, groups_ = 1, padded_ = 0, rows_ = 0, rows_per_task_ = 1;
};

}  // namespace

std::unique_ptr<Operator> make_quantized_linear() { return std::make_unique<QuantizedLinear>(); }

}  // namespace kernel_pytorch
