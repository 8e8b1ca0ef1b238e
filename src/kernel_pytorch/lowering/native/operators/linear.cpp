// (x, weight, -bias, -scales) -> y = x weight^T + bias in float32. Weights are packed as (ceil(outputs / kPanel),
// inputs, kPanel) in float32, float16 or bfloat16, or in int8 with a scale for each output.
#include <algorithm>

#include "operators/registry.h"

namespace kernel_pytorch {
namespace {

using format::kPanel;

constexpr int64_t kRowStep = 12;  // a multiple of the rows that a kernel keeps in registers, for every target
constexpr int64_t kMaxFeatures = int64_t{1} << 32;

bool has_contiguous_rows(const View& view) { return view.strides[view.rank - 1] == 1 || view.dims[view.rank - 1] == 1; }

int64_t row_offset(const View& view, int64_t row) {
  int64_t offset = 0;
  for (int d = view.rank - 2; d >= 0; --d) {
    offset += row % view.dims[d] * view.strides[d];
    row /= view.dims[d];
  }
  return offset;
}

class Linear final : public Operator {
 public:
  bool check(LoadContext& /*context*/, Reason& reason) override {
    return (has_operands(4, 2, 1) && op->floats.empty() && op->ints.empty()) || wrong_operands(reason);
  }

  bool resolve(Reason& reason) override {
    const View &x = inputs[0], &weight = inputs[1], &y = outputs[0];
    const bool quantized = weight.dtype == DType::kInt8;
    const bool dtypes =
        x.dtype == DType::kFloat32 && y.dtype == DType::kFloat32 && (quantized || is_float(weight.dtype));
    if (!dtypes || x.rank < 1 || y.rank != x.rank || weight.rank != 3 ||
        !std::equal(x.dims, x.dims + x.rank - 1, y.dims)) {
      return reason.set("the shapes or dtypes of a linear do not fit each other");
    }
    const int64_t in = x.dims[x.rank - 1], out = y.dims[y.rank - 1];
    if (in < 1 || out < 1 || in > kMaxFeatures || out > kMaxFeatures) {
      return reason.set("a linear has %lld inputs and %lld outputs", static_cast<long long>(in),
                        static_cast<long long>(out));
    }
    const int64_t panels = (out + kPanel - 1) / kPanel;
    const bool packed = weight.dims[0] == panels && weight.dims[1] == in && weight.dims[2] == kPanel &&
                        weight.strides[2] == 1 && weight.strides[1] == kPanel && weight.strides[0] == in * kPanel;
    if (!packed || !has_contiguous_rows(x) || !has_contiguous_rows(y)) {
      return reason.set("the weight of a linear is not packed, or its rows are not contiguous");
    }
    if (!is_per_output(2, out, reason) || !is_per_output(3, out, reason)) return false;
    if (quantized != has_input[3]) return reason.set("a linear needs scales if its weight is int8, and only then");

    schedule.scratch_bytes = weight.dtype == DType::kFloat32 ? 0 : static_cast<size_t>(in) * kPanel * sizeof(float);
    const int64_t rows = x.numel() / in;
    // Many rows, because each block of them reads all weights; few enough that every worker gets some.
    rows_per_task_ = kMaxLinearRows;
    rows_per_task_ = (rows / std::max<int64_t>(row_blocks(rows), 1) + kRowStep) / kRowStep * kRowStep;
    rows_per_task_ = std::min(rows_per_task_, kMaxLinearRows);  // all blocks about as large
    while (rows_per_task_ > kRowStep && row_blocks(rows) * panels < max_workers * 4) rows_per_task_ -= kRowStep;
    schedule.tasks = row_blocks(rows) * panels;
    const double products = static_cast<double>(x.numel()) * static_cast<double>(out);
    schedule.workers = products > kParallelElements * 16.0 ? max_workers : 1;
    schedule.tasks_per_claim = std::clamp<int64_t>(schedule.tasks / (schedule.workers * 8), 1, panels);
    return true;
  }

  void run(int64_t begin, int64_t end, char* scratch) const override {
    const View &x = inputs[0], &weight = inputs[1], &y = outputs[0];
    const int64_t panels = weight.dims[0];
    LinearTask task;
    task.inputs = x.dims[x.rank - 1];
    task.outputs = y.dims[y.rank - 1];
    task.bias = has_input[2] ? reinterpret_cast<const float*>(inputs[2].data) : nullptr;
    task.scales = has_input[3] ? reinterpret_cast<const float*>(inputs[3].data) : nullptr;
    task.dtype = weight.dtype;
    const int64_t all_rows = x.numel() / task.inputs;
    const int64_t panel_bytes = task.inputs * kPanel * static_cast<int64_t>(size_of(weight.dtype));
    int64_t block = -1;
    for (int64_t n = begin; n < end; ++n) {
      if (n / panels != block) {
        block = n / panels;
        task.rows = std::min(rows_per_task_, all_rows - block * rows_per_task_);
        for (int64_t r = 0; r < task.rows; ++r) {
          const int64_t row = block * rows_per_task_ + r;
          task.x[r] = reinterpret_cast<const float*>(x.data) + row_offset(x, row);
          task.y[r] = reinterpret_cast<float*>(y.data) + row_offset(y, row);
        }
      }
      task.panel = n % panels;
      task.weights = weight.data + task.panel * panel_bytes;
      kernels->linear(task, reinterpret_cast<float*>(scratch));
    }
  }

  double cost() const override {
    const View& x = inputs[0];
    return static_cast<double>(schedule.tasks) * static_cast<double>(rows_per_task_ * kPanel) *
           static_cast<double>(x.dims[x.rank - 1]);
  }

 private:
  int64_t row_blocks(int64_t rows) const { return (rows + rows_per_task_ - 1) / rows_per_task_; }

  bool is_per_output(size_t input, int64_t count, Reason& reason) const {
    const View& view = inputs[input];
    if (!has_input[input]) return true;
    const bool good = view.rank == 1 && view.dims[0] == count && view.dtype == DType::kFloat32 &&
                      (view.strides[0] == 1 || count == 1);
    return good ||
           reason.set("the bias or the scales of a linear do not fit %lld outputs", static_cast<long long>(count));
  }

  int64_t rows_per_task_ = kRowStep;
};

}  // namespace

std::unique_ptr<Operator> make_linear() { return std::make_unique<Linear>(); }

}  // namespace kernel_pytorch
