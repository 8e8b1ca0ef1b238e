#include "operators/tiled_attention.h"

#include <algorithm>

#include "operators/tile_ranges.h"

namespace kernel_pytorch {
namespace {

constexpr int64_t kMaxRows = int64_t{1} << 40;

}  // namespace

bool TiledAttention::schedule_tiles(int64_t kv_heads, int64_t keys, int64_t value_dim, Reason& reason) {
  const View& q = inputs[0];
  // Dimensions of an empty tensor are not bounded by its number of elements.
  int64_t rows;
  if (__builtin_mul_overflow(q.dims[2], q.dims[1] / kv_heads, &rows) || rows > kMaxRows) {
    return reason.set("%s has too many rows", name);
  }
  const int64_t tiles = (rows + kernels->attention_rows - 1) / kernels->attention_rows;
  if (__builtin_mul_overflow(q.dims[0] * kv_heads, tiles, &schedule.tasks)) {
    return reason.set("%s has too many rows", name);
  }
  schedule.scratch_bytes =
      TileRanges::bytes(max_ranges(), work_ranges(), kernels->attention_scratch(q.dims[3], value_dim));
  schedule.tasks_per_claim = 1;
  schedule.workers = q.numel() * std::min<int64_t>(keys, 64) > kParallelElements * 4 ? max_workers : 1;
  return true;
}

double TiledAttention::cost_over(int64_t keys, int64_t value_dim) const {
  return static_cast<double>(schedule.tasks) * static_cast<double>(kernels->attention_rows) *
         static_cast<double>(keys) * static_cast<double>(inputs[0].dims[3] + value_dim);
}

void TiledAttention::run(int64_t begin, int64_t end, char* memory) const {
  const View &q = inputs[0], &out = outputs[0];
  const KeysAndValues kv = keys_and_values();
  const View* const bias_view = bias();
  const View* const lse_view = lse();
  const int64_t kv_heads = kv.k.dims[1], group = q.dims[1] / kv_heads, all_rows = q.dims[2] * group;
  const int64_t tile_rows = kernels->attention_rows, tiles = (all_rows + tile_rows - 1) / tile_rows;
  const bool no_keys = kv.k.dims[2] == 0;  // strides of empty tensors may be too large to multiply
  const auto at = [](const View& view, int64_t b, int64_t head, int64_t row) {
    const int64_t offset = b * view.strides[0] + head * view.strides[1] + row * view.strides[2];
    return view.data + offset * static_cast<int64_t>(size_of(view.dtype));
  };
  TileRanges ranges(memory, max_ranges(), work_ranges());

  AttentionTile tile = {};
  tile.dtype = q.dtype;
  tile.q_stride = q.strides[3];
  tile.out_stride = out.strides[3];
  tile.kv_dtype = kv.k.dtype;
  tile.bias_dtype = bias_view ? bias_view->dtype : DType::kFloat32;
  tile.bias_stride = bias_view ? bias_view->strides[3] : 0;
  tile.k_row = kv.k.strides[2];
  tile.k_stride = kv.k.strides[3];
  tile.v_row = kv.v.strides[2];
  tile.v_stride = kv.v.strides[3];
  tile.dim = q.dims[3];
  tile.value_dim = kv.v.dims[3];
  tile.scale = static_cast<float>(op->floats[0]);

  for (int64_t task = begin; task < end; ++task) {
    // Last tiles first: they have the most keys under a causal mask, and long tasks should not start late.
    const int64_t t = tiles - 1 - task % tiles, kv_head = task / tiles % kv_heads, b = task / tiles / kv_heads;
    tile.rows = std::min(tile_rows, all_rows - t * tile_rows);
    tile.k = no_keys ? nullptr : at(kv.k, b, kv_head, 0);
    tile.v = no_keys ? nullptr : at(kv.v, b, kv_head, 0);
    if (kv.k_scales) {
      const int64_t first = (b * kv_heads + kv_head) * kv.k.dims[2];
      tile.k_scales = kv.k_scales + first;
      tile.v_scales = kv.v_scales + first;
    }
    ranges.clear();
    for (int64_t r = 0; r < tile.rows; ++r) {
      const int64_t query = (t * tile_rows + r) / group, head = kv_head * group + (t * tile_rows + r) % group;
      tile.q[r] = at(q, b, head, query);
      tile.out[r] = at(out, b, head, query);
      tile.lse[r] = lse_view ? reinterpret_cast<float*>(at(*lse_view, b, head, query)) : nullptr;
      tile.bias[r] = bias_view && !no_keys ? at(*bias_view, b, head, query) : nullptr;
      ranges.add_row(r, [&](KeyRange* own, KeyRange* work) { return key_ranges(b, head, query, own, work); });
    }
    ranges.put_into(tile);
    kernels->attention(tile, ranges.kernel_scratch());
  }
}

}  // namespace kernel_pytorch
