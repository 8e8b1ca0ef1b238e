// A key-value cache of attention sinks and a ring buffer for a sliding window. kernel_pytorch/kv_cache.py defines it.
#pragma once

#include <algorithm>
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

  // Whether `tokens` may be written from `position` on. Changes nothing.
  bool accepts(int64_t position, int64_t tokens, Reason& reason) const;

  // Records that tokens [position, position + tokens) are written; they are the positions of the next queries.
  void advance(int64_t position, int64_t tokens);
  int64_t position() const { return position_; }

  // Writes the slots that a query at `position` attends to as sorted disjoint ranges, at most kMaxRanges, and returns
  // how many. All of these slots have been written, for any position.
  static constexpr int64_t kMaxRanges = 3;
  int64_t ranges(int64_t position, KeyRange* out) const;

  // A copy of the history, in saved_bytes() bytes. Slots that hold no token are left out.
  size_t saved_bytes() const;
  void save(char* out) const;

  // How many bytes of `data` are a history that save() wrote for a cache of this shape, or 0 with a reason.
  size_t check_saved(const char* data, size_t size, Reason& reason) const;
  // Takes over a history that check_saved() accepted.
  void restore(const char* data);

  // Shape (batch, heads, slots, dim). Scales, which only int8 has: (batch, heads, slots).
  char* keys() const { return memory_.get(); }
  char* values() const { return memory_.get() + keys_bytes_; }
  float* key_scales() const { return scales(0); }
  float* value_scales() const { return scales(1); }

 private:
  struct Saved;

  // The slots that hold tokens are the first of each row of slots.
  int64_t used_slots(int64_t seen, int64_t low) const { return low > shape_.sinks ? slots() : std::min(seen, slots()); }
  size_t bytes_of(int64_t used) const;
  // Calls visit(bytes in the cache, bytes) for what is used of each row of keys, values and scales, in order.
  template <typename Visit>
  void visit_rows(int64_t used, Visit visit) const;

  float* scales(int64_t which) const {
    if (shape_.dtype != DType::kInt8) return nullptr;
    return reinterpret_cast<float*>(memory_.get() + keys_bytes_ + values_bytes_) + which * rows_;
  }

  CacheShape shape_;
  int64_t rows_ = 0;
  size_t keys_bytes_ = 0, values_bytes_ = 0;
  std::unique_ptr<char, void (*)(void*)> memory_{nullptr, nullptr};
  int64_t seen_ = 0;      // tokens
  int64_t low_ = 0;       // first position in the ring that is not overwritten
  int64_t position_ = 0;  // of the first token of the last write
};

}  // namespace kernel_pytorch
