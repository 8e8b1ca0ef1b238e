// x -> y along the last dimension.
#include "operators/registry.h"
#include "operators/row_operator.h"

namespace kernel_pytorch {
namespace {

class Softmax final : public RowOperator {
 public:
  bool check(LoadContext& /*context*/, Reason& reason) override {
    return (has_operands(1, 1, 1) && op->floats.empty() && op->ints.empty()) || wrong_operands(reason);
  }

  bool resolve(Reason& reason) override { return resolve_rows(1, reason) && output_matches(reason); }

  void run(int64_t begin, int64_t end, char* scratch) const override {
    kernels->softmax({inputs[0], outputs[0]}, begin, end, reinterpret_cast<float*>(scratch));
  }
};

}  // namespace

std::unique_ptr<Operator> make_softmax() { return std::make_unique<Softmax>(); }

}  // namespace kernel_pytorch
