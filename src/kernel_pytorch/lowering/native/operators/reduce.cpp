// x -> y, whose last dimension is 1; ints: the Reduction.
#include <algorithm>

#include "operators/registry.h"
#include "operators/row_operator.h"

namespace kernel_pytorch {
namespace {

class Reduce final : public RowOperator {
 public:
  bool check(LoadContext& /*context*/, Reason& reason) override {
    const bool good = has_operands(1, 1, 1) && op->floats.empty() && op->ints.size() == 1 &&
                      format::is_one_of<format::Reduction>(op->ints[0]);
    return good || wrong_operands(reason);
  }

  bool resolve(Reason& reason) override {
    if (!resolve_rows(1, reason)) return false;
    const View &in = inputs[0], &out = outputs[0];
    if (out.rank != in.rank || out.dims[out.rank - 1] != 1 || !std::equal(in.dims, in.dims + in.rank - 1, out.dims)) {
      return reason.set("the output of reduce has another shape than the rows of its input");
    }
    return true;
  }

  void run(int64_t begin, int64_t end, char* scratch) const override {
    const auto reduction = static_cast<format::Reduction>(op->ints[0]);
    kernels->reduce({inputs[0], outputs[0]}, reduction, begin, end, reinterpret_cast<float*>(scratch));
  }
};

}  // namespace

std::unique_ptr<Operator> make_reduce() { return std::make_unique<Reduce>(); }

}  // namespace kernel_pytorch
