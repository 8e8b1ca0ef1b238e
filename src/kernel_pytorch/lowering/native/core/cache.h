// A key-value cache: sinks, and a ring that holds a sliding window. kernel_pytorch/kv_cache.py defines it.
#pragma once

#include <memory>

#include "core/payload.h"

namespace kernel_pytorch {

class Cache {
 public:
  static std::shared_ptr<Cache> make(const CacheShape& shape, Reason& reason);

  const CacheShape& shape() const { return shape_; }
  int64_t slots() const { return shape_.sinks + shape_.ring; }
  int64_t slot(int64_t position) const {
    return position < shape_.sinks ? position : shape_.sinks + (position - shape_.sinks) % shape_.ring;
  }

  // Whether so many tokens may be written from a position on; nothing changes.
  bool accepts(int64_t position, int64_t tokens, Reason& reason) const;

  // The tokens that are written now, and that queries then stand at.
  void advance(int64_t position, int64_t tokens);
  int64_t position() const { return position_; }

  // The slots that a query at a position attends to, as sorted disjoint runs, at most kMostRuns; all of them are
  // slots that have been written, whatever the position.
  static constexpr int64_t kMostRuns = 3;
  int64_t runs(int64_t position, Run* out) const;

  // (batch, heads, slots, dim), and (batch, heads, slots) for the scales, which int8 alone has.
  char* keys() const { return memory_.get(); }
  char* values() const { return memory_.get() + keys_bytes_; }
  float* key_scales() const { return scales(0); }
  float* value_scales() const { return scales(1); }

 private:
  float* scales(int64_t which) const {
    if (shape_.dtype != DType::kInt8) return nullptr;
    return reinterpret_cast<float*>(memory_.get() + keys_bytes_ + values_bytes_) + which * rows_;
  }

  CacheShape shape_;
  int64_t rows_ = 0;
  size_t keys_bytes_ = 0, values_bytes_ = 0;
  std::unique_ptr<char, void (*)(void*)> memory_{nullptr, nullptr};
  int64_t seen_ = 0;      // tokens
  int64_t low_ = 0;       // the first position of the ring that is still there
  int64_t position_ = 0;  // of the first token that was written last
};

}  // namespace kernel_pytorch
