// (k, v, position) -> nothing: writes new rows, (batch, heads, tokens, dim), to a cache; position is an input of the
// program with one int64 element; ints: the cache. One op per program writes a cache, before others read it.
#include <algorithm>
#include <cstring>

#include "operators/cache_operand.h"
#include "operators/registry.h"

namespace kernel_pytorch {
namespace {

class CacheWrite final : public Operator {
 public:
  bool check(LoadContext& context, Reason& reason) override {
    cache_ = cache_operand(*op, context);
    if (!has_operands(3, 3, 0) || !op->floats.empty() || cache_ == nullptr) return wrong_operands(reason);
    const size_t index = static_cast<size_t>(op->ints[0]);
    if (context.written[index]) return reason.set("a cache is written twice in one run");
    context.written[index] = true;
    // An input: its contents are known before any op runs, so accept() can reject a wrong position.
    const Buffer& buffer = context.payload.buffers[context.payload.values[op->inputs[2]].buffer];
    return buffer.kind == format::BufferKind::kInput ||
           reason.set("the position of cache '%.64s' is not an input of the program", cache_->shape().name.c_str());
  }

  bool resolve(Reason& reason) override {
    const View &k = inputs[0], &v = inputs[1], &position = inputs[2];
    const CacheShape& shape = cache_->shape();
    const auto fits = [&](const View& view, int64_t dim) {
      return view.rank == 4 && is_float(view.dtype) && view.dims[0] == shape.batch && view.dims[1] == shape.heads &&
             view.dims[3] == dim;
    };
    if (!fits(k, shape.dim) || !fits(v, shape.value_dim) || k.dims[2] != v.dims[2]) {
      return reason.set("the keys or values for cache '%.64s' have another shape than the cache", shape.name.c_str());
    }
    if (position.dtype != DType::kInt64 || position.numel() != 1) {
      return reason.set("the position of cache '%.64s' is not one int64 element", shape.name.c_str());
    }
    schedule.split_rows(k.dims[0] * k.dims[1] * k.dims[2], k.numel() + v.numel(), max_workers);
    schedule.scratch_bytes = static_cast<size_t>(std::max(shape.dim, shape.value_dim)) * sizeof(float);
    return true;
  }

  bool accept(Reason& reason) override {
    std::memcpy(&position_, inputs[2].data, sizeof(position_));
    return cache_->accepts(position_, tokens(), reason);
  }

  void start() override { cache_->advance(position_, tokens()); }

  // A task is one token of one head.
  void run(int64_t begin, int64_t end, char* scratch) const override {
    const int64_t heads = cache_->shape().heads;
    for (int64_t n = begin; n < end; ++n) {
      const int64_t token = n % tokens(), head = n / tokens() % heads, b = n / tokens() / heads;
      const int64_t row = (b * heads + head) * cache_->slots() + cache_->slot(position_ + token);
      for (int which = 0; which < 2; ++which) {
        const View& from = inputs[which];
        const int64_t offset = b * from.strides[0] + head * from.strides[1] + token * from.strides[2];
        const int64_t row_bytes = from.dims[3] * static_cast<int64_t>(size_of(cache_->shape().dtype));
        float* const scales = which == 0 ? cache_->key_scales() : cache_->value_scales();
        CacheRow task;
        task.from = from.data + offset * static_cast<int64_t>(size_of(from.dtype));
        task.from_dtype = from.dtype;
        task.stride = from.strides[3];
        task.count = from.dims[3];
        task.to = (which == 0 ? cache_->keys() : cache_->values()) + row * row_bytes;
        task.to_dtype = cache_->shape().dtype;
        task.scale = scales ? scales + row : nullptr;
        kernels->cache_row(task, reinterpret_cast<float*>(scratch));
      }
    }
  }

  double cost() const override { return static_cast<double>(schedule.tasks) * static_cast<double>(inputs[0].dims[3]); }

 private:
  int64_t tokens() const { return inputs[0].dims[2]; }

  Cache* cache_ = nullptr;
  int64_t position_ = 0;
};

}  // namespace

std::unique_ptr<Operator> make_cache_write() { return std::make_unique<CacheWrite>(); }

}  // namespace kernel_pytorch
