// The common part of attention over tensors and over a cache: splits the rows into tiles, and collects for each tile
// the key ranges of its rows.
#pragma once

#include "core/operator.h"

namespace kernel_pytorch {

// Keys and values of one run, (batch, kv heads, keys, dim).
struct KeysAndValues {
  View k, v;
  const float* k_scales = nullptr;  // (batch, kv heads, keys), for int8
  const float* v_scales = nullptr;
};

class TiledAttention : public Operator {
 public:
  void run(int64_t begin, int64_t end, char* scratch) const override;

 protected:
  // Splits the rows of q, which is input 0, into tiles and reserves their scratch. max_ranges() and work_ranges()
  // must be final.
  bool schedule_tiles(int64_t kv_heads, int64_t keys, int64_t value_dim, Reason& reason);

  // The cost of attention over `keys` keys.
  double cost_over(int64_t keys, int64_t value_dim) const;

  // The largest number of ranges that key_ranges() returns, and the scratch that it needs.
  virtual int64_t max_ranges() const = 0;
  virtual int64_t work_ranges() const = 0;

  // Writes the sorted, disjoint ranges of keys that a query attends to and returns how many.
  virtual int64_t key_ranges(int64_t batch, int64_t head, int64_t query, KeyRange* out, KeyRange* work) const = 0;

  virtual KeysAndValues keys_and_values() const = 0;
  virtual const View* bias() const { return nullptr; }
  virtual const View* lse() const { return nullptr; }
};

}  // namespace kernel_pytorch
