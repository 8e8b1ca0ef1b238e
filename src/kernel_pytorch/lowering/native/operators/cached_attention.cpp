// q -> out over a cache, (batch, heads, tokens, dim), for the tokens of the last write; ints: the cache; floats: scale.
#include <algorithm>

#include "operators/cache_operand.h"
#include "operators/registry.h"
#include "operators/tiled_attention.h"

namespace kernel_pytorch {
namespace {

class CachedAttention final : public TiledAttention {
 public:
  bool check(LoadContext& context, Reason& reason) override {
    cache_ = cache_operand(*op, context);
    return (has_operands(1, 1, 1) && has_one_float() && cache_ != nullptr) || wrong_operands(reason);
  }

  bool resolve(Reason& reason) override {
    const View &q = inputs[0], &out = outputs[0];
    const CacheShape& shape = cache_->shape();
    const bool good = q.rank == 4 && out.rank == 4 && is_float(q.dtype) && out.dtype == q.dtype &&
                      q.dims[0] == shape.batch && q.dims[1] % shape.heads == 0 && q.dims[3] == shape.dim &&
                      std::equal(q.dims, q.dims + 3, out.dims) && out.dims[3] == shape.value_dim;
    if (!good) return reason.set("attention over cache '%.64s' has another shape than the cache", shape.name.c_str());
    if (q.dims[2] >= (int64_t{1} << 30) || q.dims[1] >= (int64_t{1} << 20) || q.dims[3] > 65536 ||
        out.dims[3] > 65536) {
      return reason.set("attention is limited to lengths below 2^30 and head dimensions up to 65536");
    }
    return schedule_tiles(shape.heads, cache_->slots(), shape.value_dim, reason);
  }

  double cost() const override { return cost_over(cache_->slots(), cache_->shape().value_dim); }

 protected:
  int64_t max_ranges() const override { return Cache::kMaxRanges; }
  int64_t work_ranges() const override { return 0; }
  int64_t key_ranges(int64_t /*batch*/, int64_t /*head*/, int64_t query, KeyRange* out,
                     KeyRange* /*work*/) const override {
    return cache_->ranges(cache_->position() + query, out);
  }
  KeysAndValues keys_and_values() const override {
    const CacheShape& shape = cache_->shape();
    return {view(cache_->keys(), shape.dim), view(cache_->values(), shape.value_dim), cache_->key_scales(),
            cache_->value_scales()};
  }

 private:
  View view(char* data, int64_t dim) const {
    const CacheShape& shape = cache_->shape();
    View view;
    view.data = data;
    view.dtype = shape.dtype;
    view.rank = 4;
    const int64_t dims[4] = {shape.batch, shape.heads, cache_->slots(), dim};
    int64_t stride = 1;
    for (int d = 3; d >= 0; --d) {
      view.dims[d] = dims[d];
      view.strides[d] = stride;
      stride *= dims[d];
    }
    return view;
  }

  const Cache* cache_ = nullptr;
};

}  // namespace

std::unique_ptr<Operator> make_cached_attention() { return std::make_unique<CachedAttention>(); }

}  // namespace kernel_pytorch
