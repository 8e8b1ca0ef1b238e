// (x, -weight, -bias) -> y along the last dimension; floats: eps.
#include "operators/norm.h"
#include "operators/registry.h"

namespace kernel_pytorch {
namespace {

class LayerNorm final : public Norm {
 public:
  LayerNorm() : Norm(/*subtract_mean=*/true) {}
  bool check(LoadContext& /*context*/, Reason& reason) override { return check_norm(3, reason); }
};

}  // namespace

std::unique_ptr<Operator> make_layer_norm() { return std::make_unique<LayerNorm>(); }

}  // namespace kernel_pytorch
