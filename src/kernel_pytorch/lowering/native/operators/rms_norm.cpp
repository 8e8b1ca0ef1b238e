// (x, -weight) -> y along the last dimension; floats: eps.
#include "operators/norm.h"
#include "operators/registry.h"

namespace kernel_pytorch {
namespace {

class RmsNorm final : public Norm {
 public:
  RmsNorm() : Norm(/*subtract_mean=*/false) {}
  bool check(LoadContext& /*context*/, Reason& reason) override { return check_norm(2, reason); }
};

}  // namespace

std::unique_ptr<Operator> make_rms_norm() { return std::make_unique<RmsNorm>(); }

}  // namespace kernel_pytorch
