// A chain of pointwise steps over operands of one shape; ints: steps of (Step, destination, a, b), then the register of
// each output; floats: the immediates. Input n starts in register n.
#include <algorithm>

#include "operators/registry.h"

namespace kernel_pytorch {
namespace {

using format::kRegisters;
using format::Step;

bool is_register(int64_t number) { return number >= 0 && number < kRegisters; }

class Pointwise final : public Operator {
 public:
  bool check(LoadContext& /*context*/, Reason& reason) override {
    const size_t outs = op->outputs.size(), ints = op->ints.size();
    if (!has_operands(op->inputs.size(), op->inputs.size(), outs) || outs < 1 || ints < outs ||
        (ints - outs) % 4 != 0) {
      return wrong_operands(reason);
    }
    for (size_t n = 0; n < ints - outs; n += 4) {
      const int64_t* const step = op->ints.data() + n;
      if (!format::is_one_of<Step>(step[0]) || !is_register(step[1]) || !is_register(step[3])) {
        return wrong_operands(reason);
      }
      const bool immediate = static_cast<Step>(step[0]) == Step::kImmediate;
      const int64_t limit = immediate ? static_cast<int64_t>(op->floats.size()) : kRegisters;
      if (step[2] < 0 || step[2] >= limit) return wrong_operands(reason);
    }
    for (size_t n = ints - outs; n < ints; ++n) {
      if (!is_register(op->ints[n])) return wrong_operands(reason);
    }
    for (double number : op->floats) immediates_.push_back(static_cast<float>(number));
    loop_.inputs = static_cast<int32_t>(op->inputs.size());
    loop_.outputs = static_cast<int32_t>(outs);
    loop_.steps = op->ints.data();
    loop_.step_count = static_cast<int64_t>((ints - outs) / 4);
    loop_.out_registers = op->ints.data() + loop_.step_count * 4;
    loop_.immediates = immediates_.data();
    return true;
  }

  bool resolve(Reason& reason) override {
    const View& shape = outputs[0];
    for (int n = 0; n < loop_.inputs + loop_.outputs; ++n) {
      const View& view = operand(n);
      if (!same_shape(view, shape)) return reason.set("the operands of a pointwise op differ in shape");
      if (!is_float(view.dtype) && !(n < loop_.inputs && view.dtype == DType::kBool)) {
        return reason.set("a pointwise op takes floating-point tensors, not %s", name_of(view.dtype));
      }
    }
    const int64_t elements = shape.numel();
    if (elements == 0) return true;  // its strides may be too large to multiply
    merge_dimensions(shape);
    for (int n = 0; n < loop_.inputs; ++n) loop_.in_dtype[n] = inputs[n].dtype;
    for (int n = 0; n < loop_.outputs; ++n) loop_.out_dtype[n] = outputs[n].dtype;
    const int64_t width = loop_.dims[loop_.rank - 1];
    find_across();
    if (loop_.tiled) {
      const int64_t height = loop_.dims[loop_.across];
      schedule.split_rows(elements / width / height * tiles(width) * tiles(height), elements, max_workers);
    } else {
      const int64_t chunks = (width + kPointwiseChunk - 1) / kPointwiseChunk;
      schedule.split_rows(elements / width * chunks, elements, max_workers);
    }
    schedule.scratch_bytes = kRegisters * kPointwiseChunk * sizeof(float);
    return true;
  }

  void start() override {
    for (int n = 0; n < loop_.inputs; ++n) loop_.in[n] = inputs[n].data;
    for (int n = 0; n < loop_.outputs; ++n) loop_.out[n] = outputs[n].data;
  }

  void run(int64_t begin, int64_t end, char* scratch) const override {
    kernels->pointwise(loop_, begin, end, reinterpret_cast<float*>(scratch));
  }

  double cost() const override { return static_cast<double>(schedule.tasks) * kPointwiseChunk; }

 private:
  const View& operand(int n) const { return n < loop_.inputs ? inputs[n] : outputs[n - loop_.inputs]; }
  int64_t* strides(int n) { return n < loop_.inputs ? loop_.in_strides[n] : loop_.out_strides[n - loop_.inputs]; }

  static int64_t tiles(int64_t size) { return (size + kPointwiseTile - 1) / kPointwiseTile; }

  // Orders the dimensions as they lie in the first output, and merges neighbours that are contiguous with each other in
  // every operand.
  void merge_dimensions(const View& shape) {
    const int operands = loop_.inputs + loop_.outputs;
    int order[kMaxRank], count = 0;
    for (int d = 0; d < shape.rank; ++d) {
      if (shape.dims[d] != 1) order[count++] = d;
    }
    std::stable_sort(order, order + count, [&](int a, int b) { return shape.strides[a] > shape.strides[b]; });
    loop_.rank = 0;
    for (int at = 0; at < count; ++at) {
      const int d = order[at];
      bool merge = loop_.rank > 0;
      for (int n = 0; merge && n < operands; ++n) {
        merge = strides(n)[loop_.rank - 1] == operand(n).strides[d] * shape.dims[d];
      }
      if (!merge) loop_.dims[loop_.rank++] = 1;
      loop_.dims[loop_.rank - 1] *= shape.dims[d];
      for (int n = 0; n < operands; ++n) strides(n)[loop_.rank - 1] = operand(n).strides[d];
    }
    if (loop_.rank > 0) return;
    loop_.rank = 1;
    loop_.dims[0] = 1;
    for (int n = 0; n < operands; ++n) strides(n)[0] = 0;
  }

  // Looks for an input that is contiguous in another dimension than the last, where both are large enough for tiles.
  void find_across() {
    const int inner = loop_.rank - 1;
    loop_.tiled = false;
    for (int n = 0; n < loop_.inputs; ++n) {
      if (loop_.in_strides[n][inner] <= 1) continue;
      for (int d = 0; d < inner && !loop_.tiled; ++d) {
        loop_.tiled = loop_.in_strides[n][d] == 1 && std::min(loop_.dims[d], loop_.dims[inner]) >= kPointwiseTile / 2;
        loop_.across = d;
      }
    }
  }

  PointwiseLoop loop_ = {};
  std::vector<float> immediates_;
};

}  // namespace

std::unique_ptr<Operator> make_pointwise() { return std::make_unique<Pointwise>(); }

}  // namespace kernel_pytorch
