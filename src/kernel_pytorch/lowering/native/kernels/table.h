// The kernels of one target, as functions in a table, and what they work on.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/format.h"
#include "core/types.h"

namespace kernel_pytorch {

constexpr int64_t kChunk = 256;      // numbers of a pointwise op that are in the cache at once
constexpr int64_t kKeysABlock = 64;  // keys whose scores are held at once
constexpr int64_t kMostRows = 32;    // rows of the widest attention tile

// One tile of rows (queries, of every head that shares the keys) and the keys they attend to.
struct AttentionTile {
  int64_t rows;
  const char* q[kMostRows];
  char* out[kMostRows];
  float* lse[kMostRows];        // where the log-sum-exp of each row goes; null where it is not wanted
  const char* bias[kMostRows];  // null where there is none
  int64_t q_stride, out_stride, bias_stride;  // of the last dimension
  DType dtype, kv_dtype, bias_dtype;
  const char* k;
  const char* v;
  int64_t k_row, k_stride, v_row, v_stride;
  const float* k_scales;  // of each key, where they are int8
  const float* v_scales;
  int64_t dim, value_dim;
  float scale;
  // Row r attends to the keys in [first, last) of each of its slots, which stand kMostRows apart.
  const int32_t* first;
  const int32_t* last;
  int64_t slots;
  const Run* runs;  // of all rows together: disjoint, rising
  int64_t run_count;
};

struct PointwiseLoop {  // operands over one index space, dimensions merged where all allow it
  int32_t rank;
  int64_t dims[kMaxRank];
  int32_t inputs, outputs;
  const char* in[format::kRegisters];
  char* out[format::kRegisters];
  DType in_dtype[format::kRegisters], out_dtype[format::kRegisters];
  int64_t in_strides[format::kRegisters][kMaxRank], out_strides[format::kRegisters][kMaxRank];
  const int64_t* steps;  // (step, destination, a, b)
  int64_t step_count;
  const int64_t* out_registers;
  const float* immediates;
};

struct CacheRow {  // one key or value, into a cache
  const char* from;
  DType from_dtype, to_dtype;
  int64_t stride, count;
  char* to;
  float* scale;  // of int8 alone
};

struct RowOp {  // norms, softmax and reductions: one row at a time
  uint32_t code;
  int64_t reduction;
  View in, out;
  const View* weight;  // null where there is none
  const View* bias;
  float eps;
};

constexpr int64_t kPanel = 32;           // outputs of a linear that are packed together
constexpr int64_t kMostLinearRows = 96;  // rows of x that one task takes

struct LinearTask {  // some rows of x times one panel of weights
  int64_t rows, inputs, outputs, panel;
  const float* x[kMostLinearRows];
  float* y[kMostLinearRows];
  const float* weights;  // of this panel
  const float* scales;   // of each output; null where weights are not int8
  const float* bias;     // null where there is none
};

struct KernelTable {
  const char* name;
  int64_t attention_rows;
  size_t (*attention_scratch)(int64_t dim, int64_t value_dim);  // bytes
  void (*attention)(const AttentionTile& tile, float* scratch);
  void (*pointwise)(const PointwiseLoop& loop, int64_t begin, int64_t end, float* scratch);  // rows x chunks
  void (*row_op)(const RowOp& op, int64_t begin, int64_t end, float* scratch);
  void (*linear)(const LinearTask& task);
  void (*unpack)(const char* from, DType dtype, float* to, int64_t count);
  void (*cache_row)(const CacheRow& row, float* scratch);        // as many floats as the row has numbers
};

// The best table for this processor, or the one that KERNEL_PYTORCH_TARGET names; null where it has no such one.
const KernelTable* kernels(Reason& reason);

}  // namespace kernel_pytorch
