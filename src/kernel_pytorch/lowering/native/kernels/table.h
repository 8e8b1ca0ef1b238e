// The kernels of one instruction set as a table of functions, and the records they take.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/format.h"
#include "core/types.h"

namespace kernel_pytorch {

constexpr int64_t kPointwiseChunk = 256;    // elements of each operand that stay in L1 while all steps run on them
constexpr int64_t kPointwiseTile = 16;      // rows and columns of a chunk that is a tile, a cache line of float32 each
constexpr int64_t kNormRows = 16;           // rows of a norm that are read together
constexpr int64_t kKeyBlock = 64;           // keys whose scores are held at once
constexpr int64_t kMaxTileRows = 32;        // rows of the largest attention tile
constexpr int64_t kMaxLinearRows = 192;     // rows of x in one linear task
constexpr int64_t kMaxQuantizedRows = 192;  // rows of x in one quantized linear task

// One tile of rows (queries of all heads that share the keys) and the keys that they attend to.
struct AttentionTile {
  int64_t rows;
  const char* q[kMaxTileRows];
  char* out[kMaxTileRows];
  float* lse[kMaxTileRows];                   // log-sum-exp of each row; null if it is not an output
  const char* bias[kMaxTileRows];             // null without bias
  int64_t q_stride, out_stride, bias_stride;  // of the last dimension
  DType dtype, kv_dtype, bias_dtype;
  const char* k;
  const char* v;
  int64_t k_row, k_stride, v_row, v_stride;  // strides between keys, and inside one
  const float* k_scales;                     // per key, for int8
  const float* v_scales;
  int64_t dim, value_dim;
  float scale;
  // Row r attends to keys [begin[n * kMaxTileRows + r], end[n * kMaxTileRows + r]) for n < ranges_per_row. Rows from
  // `rows` on must cover all keys.
  const int32_t* begin;
  const int32_t* end;
  int64_t ranges_per_row;
  const KeyRange* ranges;  // the union over rows: disjoint, ascending
  int64_t range_count;
};

// The gradients of one tile of rows; `tile` is what the forward had, and what it gave.
struct AttentionBackwardTile {
  AttentionTile tile;
  const char* dout[kMaxTileRows];
  const float* dlse[kMaxTileRows];  // null where nothing flows through the log-sum-exp
  char* dq[kMaxTileRows];
  int64_t dout_stride, dq_stride;  // of the last dimension
  float* dk;                       // (keys, dim), to be added to
  float* dv;                       // (keys, value_dim), to be added to
};

// Operands of a pointwise op over one index space, with dimensions merged where all operands allow it.
struct PointwiseLoop {
  int32_t rank;
  int64_t dims[kMaxRank];
  int32_t inputs, outputs;
  const char* in[format::kRegisters];
  char* out[format::kRegisters];
  DType in_dtype[format::kRegisters], out_dtype[format::kRegisters];
  int64_t in_strides[format::kRegisters][kMaxRank], out_strides[format::kRegisters][kMaxRank];
  const int64_t* steps;  // (Step, destination, a, b)
  int64_t step_count;
  const int64_t* out_registers;
  const float* immediates;
  // Where an input is contiguous in another dimension than the last, `across`, a task is a tile of both, so that each
  // cache line is read once. Otherwise a task is a chunk of the last dimension.
  bool tiled;
  int32_t across;
};

// An op along the last dimension of `in`.
struct RowTask {
  View in, out;
};

struct NormTask {
  View in, out;
  const View* weight;  // null if absent
  const View* bias;    // null if absent
  float eps;
  bool subtract_mean;  // LayerNorm; false for RMSNorm
  // Rows that are read together: several where a column of `in` is contiguous and its rows are not.
  int64_t rows_at_once = 1;
};

// Rows of x times one panel of packed weights.
struct LinearTask {
  int64_t rows, inputs, outputs, panel;
  const float* x[kMaxLinearRows];
  float* y[kMaxLinearRows];
  const char* weights;  // of this panel, [input][kPanel]
  DType dtype;          // of the weights
  const float* scales;  // per output, for int8 weights; null otherwise
  const float* bias;    // null if absent
};

// One row of x in 8 bits: element = scale (data - zero_point).
struct QuantizedRow {
  uint8_t* data;        // padded elements
  int32_t* group_sums;  // of the data, per group
  float* scale;
  int32_t* zero_point;
  int64_t padded, group;
};

// Rows of quantized x times one panel of quantized weights.
struct QuantizedLinearTask {
  int64_t rows, padded, group, bits;
  int64_t columns;  // outputs of this panel, at most kPanel
  QuantizedRow x[kMaxQuantizedRows];
  float* y[kMaxQuantizedRows];  // of this panel
  const char* weights;
  const float* scales;  // [group][kPanel]
  const float* sums;    // [kPanel]: the sum of the dequantized weights of each output
  const float* bias;    // of this panel; null if absent
};

// One key or value that is written to a cache.
struct CacheRow {
  const char* from;
  DType from_dtype, to_dtype;
  int64_t stride, count;
  char* to;
  float* scale;  // written for int8
};

// Ranges [begin, end) count rows; for pointwise, chunks of rows. Scratch is aligned to 64 bytes.
struct KernelTable {
  const char* name;
  int64_t attention_rows;                                       // of a full tile
  size_t (*attention_scratch)(int64_t dim, int64_t value_dim);  // bytes
  void (*attention)(const AttentionTile& tile, float* scratch);
  size_t (*attention_backward_scratch)(int64_t dim, int64_t value_dim);  // bytes
  void (*attention_backward)(const AttentionBackwardTile& task, float* scratch);
  void (*pointwise)(const PointwiseLoop& loop, int64_t begin, int64_t end, float* scratch);
  void (*norm)(const NormTask& task, int64_t begin, int64_t end, float* scratch);    // scratch: rows_at_once + 2 rows
  void (*softmax)(const RowTask& task, int64_t begin, int64_t end, float* scratch);  // scratch: one row
  void (*reduce)(const RowTask& task, format::Reduction reduction, int64_t begin, int64_t end, float* scratch);
  void (*linear)(const LinearTask& task, float* scratch);  // scratch: kPanel x inputs, unless weights are float32
  void (*cache_row)(const CacheRow& row, float* scratch);  // scratch: one row
  void (*quantize_row)(const float* x, int64_t count, const QuantizedRow& row);
  void (*quantized_linear)(const QuantizedLinearTask& task);
};

// The best table for this processor, or the one named by KERNEL_PYTORCH_TARGET; null if the processor lacks it.
const KernelTable* kernels(Reason& reason);

// All tables that this processor can run, best first; returns how many.
constexpr int kMaxTables = 5;
int available_kernels(const KernelTable* tables[kMaxTables]);

}  // namespace kernel_pytorch
