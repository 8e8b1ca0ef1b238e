// (q, k, v, -bias) -> out, all (batch, heads, length, dim), and optionally the log-sum-exp of each row in float32,
// (batch, heads, length); ints: the code of the mask; floats: scale.
#include <algorithm>

#include "core/mask.h"
#include "operators/registry.h"
#include "operators/tiled_attention.h"

namespace kernel_pytorch {
namespace {

constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr int64_t kMaxHeadDim = 65536;

class Attention final : public TiledAttention {
 public:
  bool check(LoadContext& /*context*/, Reason& reason) override {
    const size_t outs = op->outputs.size();
    if (!has_operands(4, 3, outs) || outs < 1 || outs > 2 || !has_one_float()) return wrong_operands(reason);
    return mask_.read(op->ints.data(), op->ints.size(), reason);
  }

  bool resolve(Reason& reason) override {
    const View &q = inputs[0], &k = inputs[1], &v = inputs[2], &out = outputs[0];
    for (const View* view : {&q, &k, &v, &out}) {
      if (view->rank != 4 || view->dtype != q.dtype || !is_float(q.dtype)) {
        return reason.set("attention takes q, k, v and out of four dimensions and the same floating-point dtype");
      }
    }
    const bool good = k.dims[0] == q.dims[0] && v.dims[0] == q.dims[0] && out.dims[0] == q.dims[0] && k.dims[1] > 0 &&
                      k.dims[1] == v.dims[1] && q.dims[1] % k.dims[1] == 0 && out.dims[1] == q.dims[1] &&
                      out.dims[2] == q.dims[2] && k.dims[2] == v.dims[2] && k.dims[3] == q.dims[3] && q.dims[3] > 0 &&
                      out.dims[3] == v.dims[3] && v.dims[3] > 0;
    if (!good) return reason.set("the shapes of attention's operands do not fit each other");
    if (k.dims[2] >= kMaxLength || q.dims[2] >= kMaxLength || q.dims[3] > kMaxHeadDim || v.dims[3] > kMaxHeadDim) {
      return reason.set("attention is limited to lengths below 2^30 and head dimensions up to 65536");
    }
    lengths_ = {q.dims[0], q.dims[1], q.dims[2], k.dims[2]};
    return bias_fits(reason) && lse_fits(reason) && mask_.fits(lengths_, reason) &&
           schedule_tiles(k.dims[1], k.dims[2], v.dims[3], reason);
  }

  double cost() const override { return cost_over(inputs[1].dims[2], inputs[2].dims[3]); }

 protected:
  int64_t max_ranges() const override { return mask_.max_ranges(); }
  int64_t work_ranges() const override { return mask_.work_ranges(); }
  int64_t key_ranges(int64_t batch, int64_t head, int64_t query, KeyRange* out, KeyRange* work) const override {
    return mask_.ranges(lengths_, batch, head, query, out, work);
  }
  KeysAndValues keys_and_values() const override { return {inputs[1], inputs[2]}; }
  const View* bias() const override { return has_input[3] ? &inputs[3] : nullptr; }
  const View* lse() const override { return op->outputs.size() == 2 ? &outputs[1] : nullptr; }

 private:
  bool bias_fits(Reason& reason) const {
    const View* const view = bias();
    if (view == nullptr) return true;
    const int64_t wanted[4] = {lengths_.batch, lengths_.heads, lengths_.queries, lengths_.keys};
    const bool good = view->rank == 4 && std::equal(wanted, wanted + 4, view->dims) &&
                      (is_float(view->dtype) || view->dtype == DType::kBool);
    return good ||
           reason.set("the bias of attention has another shape than its scores, or a dtype other than float or bool");
  }

  bool lse_fits(Reason& reason) const {
    const View* const view = lse();
    if (view == nullptr) return true;
    const bool good =
        view->rank == 3 && view->dtype == DType::kFloat32 && std::equal(view->dims, view->dims + 3, inputs[0].dims);
    return good || reason.set("the log-sum-exp of attention must be float32 with one element per row");
  }

  Mask mask_;
  MaskLengths lengths_ = {};
};

}  // namespace

std::unique_ptr<Operator> make_attention() { return std::make_unique<Attention>(); }

}  // namespace kernel_pytorch
