// Attention and its caches: shapes, tasks, and the runs of keys of each tile.
#include <algorithm>
#include <climits>
#include <cstring>

#include "core/program.h"

namespace kernel_pytorch {

using namespace format;

bool Program::resolve_attention(ReadyOp& ready, Reason& reason) {
  const View &q = ready.views[0], &k = ready.views[1], &v = ready.views[2], &bias = ready.views[3],
             &out = ready.views[4];
  for (const View* view : {&q, &k, &v, &out}) {
    if (view->rank != 4 || view->dtype != q.dtype || !is_float(q.dtype)) {
      return reason.set("attention takes q, k, v and out of four dimensions and one floating format");
    }
  }
  const bool good = k.dims[0] == q.dims[0] && v.dims[0] == q.dims[0] && out.dims[0] == q.dims[0] && k.dims[1] > 0 &&
                    k.dims[1] == v.dims[1] && q.dims[1] % k.dims[1] == 0 && out.dims[1] == q.dims[1] &&
                    out.dims[2] == q.dims[2] && k.dims[2] == v.dims[2] && k.dims[3] == q.dims[3] && q.dims[3] > 0 &&
                    out.dims[3] == v.dims[3] && v.dims[3] > 0;
  if (!good) return reason.set("attention's shapes do not fit each other");
  if (k.dims[2] >= (int64_t{1} << 30) || q.dims[2] >= (int64_t{1} << 30) || q.dims[3] > 65536 || v.dims[3] > 65536) {
    return reason.set("attention's lengths are too large");
  }
  if (ready.there[3]) {
    const int64_t wanted[4] = {q.dims[0], q.dims[1], q.dims[2], k.dims[2]};
    if (bias.rank != 4 || !std::equal(wanted, wanted + 4, bias.dims) ||
        !(is_float(bias.dtype) || bias.dtype == DType::kBool)) {
      return reason.set("attention's bias has another shape or format than its scores");
    }
  }
  const View& lse = ready.views[5];
  if (ready.op->outputs.size() == 2 &&
      (lse.rank != 3 || lse.dtype != DType::kFloat32 || !std::equal(q.dims, q.dims + 3, lse.dims))) {
    return reason.set("attention's log-sum-exp has another shape or format than its rows");
  }
  const MaskLengths lengths = {q.dims[0], q.dims[1], q.dims[2], k.dims[2]};
  if (!ready.mask.fits(lengths, reason)) return false;
  return plan_attention(ready, q, k.dims[1], k.dims[2], v.dims[3], ready.mask.most_runs(), ready.mask.work_runs(),
                        reason);
}

// Tiles of rows, each a task of its own, and their scratch.
bool Program::plan_attention(ReadyOp& ready, const View& q, int64_t kv_heads, int64_t keys, int64_t value_dim,
                             int64_t slots, int64_t work_runs, Reason& reason) {
  const int64_t rows = q.dims[2] * (q.dims[1] / kv_heads);
  const int64_t tiles = (rows + kernels_->attention_rows - 1) / kernels_->attention_rows;
  if (__builtin_mul_overflow(q.dims[0] * kv_heads, tiles, &ready.tasks)) return reason.set("attention is too large");
  ready.scratch = kernels_->attention_scratch(q.dims[3], value_dim) +
                  static_cast<size_t>(slots) * (2 * sizeof(int32_t) * kMostRows + sizeof(Run) * (kMostRows + 1)) +
                  static_cast<size_t>(work_runs) * sizeof(Run) + 256;
  ready.tasks_at_once = 1;
  ready.workers = q.numel() * std::min<int64_t>(keys, 64) > kWorthAThread * 4 ? workers_ : 1;
  return true;
}

bool Program::resolve_cache_write(ReadyOp& ready, Reason& reason) {
  const View &k = ready.views[0], &v = ready.views[1], &position = ready.views[2];
  const CacheShape& shape = ready.cache->shape();
  const auto fits = [&](const View& view, int64_t dim) {
    return view.rank == 4 && is_float(view.dtype) && view.dims[0] == shape.batch && view.dims[1] == shape.heads &&
           view.dims[3] == dim;
  };
  if (!fits(k, shape.dim) || !fits(v, shape.value_dim) || k.dims[2] != v.dims[2]) {
    return reason.set("what is written to cache '%.64s' has another shape", shape.name.c_str());
  }
  // An input, so that a position that does not fit is refused before anything has run.
  const Buffer& buffer = payload_.buffers[payload_.values[ready.op->inputs[2]].buffer];
  if (position.dtype != DType::kInt64 || position.numel() != 1 || buffer.kind != kInput) {
    return reason.set("the position of cache '%.64s' is not one int64 number", shape.name.c_str());
  }
  ready.tasks = k.dims[0] * k.dims[1] * k.dims[2];
  ready.workers = k.numel() + v.numel() > kWorthAThread ? workers_ : 1;
  ready.tasks_at_once = share(ready.tasks, ready.workers);
  ready.scratch = static_cast<size_t>(std::max(shape.dim, shape.value_dim)) * sizeof(float);
  return true;
}

bool Program::resolve_cached_attention(ReadyOp& ready, Reason& reason) {
  const View &q = ready.views[0], &out = ready.views[1];
  const CacheShape& shape = ready.cache->shape();
  const bool good = q.rank == 4 && out.rank == 4 && is_float(q.dtype) && out.dtype == q.dtype &&
                    q.dims[0] == shape.batch && q.dims[1] % shape.heads == 0 && q.dims[3] == shape.dim &&
                    std::equal(q.dims, q.dims + 3, out.dims) && out.dims[3] == shape.value_dim;
  if (!good) return reason.set("attention over cache '%.64s' has another shape", shape.name.c_str());
  if (q.dims[2] >= (int64_t{1} << 30) || q.dims[1] >= (int64_t{1} << 20) || q.dims[3] > 65536 || out.dims[3] > 65536) {
    return reason.set("attention's lengths are too large");
  }
  return plan_attention(ready, q, shape.heads, ready.cache->slots(), shape.value_dim, Cache::kMostRuns, 0, reason);
}

void Program::cache_tasks(const ReadyOp& ready, int64_t begin, int64_t end, float* scratch) const {
  const Cache& cache = *ready.cache;
  const DType dtype = cache.shape().dtype;
  const int64_t bytes = static_cast<int64_t>(size_of(dtype)), tokens = ready.views[0].dims[2];
  for (int64_t n = begin; n < end; ++n) {
    const int64_t head = n / tokens % cache.shape().heads, b = n / tokens / cache.shape().heads;
    const int64_t row = (b * cache.shape().heads + head) * cache.slots() + cache.slot(ready.position + n % tokens);
    for (int which = 0; which < 2; ++which) {
      const View& from = ready.views[which];
      const int64_t at = b * from.strides[0] + head * from.strides[1] + n % tokens * from.strides[2];
      float* const scales = which == 0 ? cache.key_scales() : cache.value_scales();
      CacheRow task;
      task.from = from.data + at * static_cast<int64_t>(size_of(from.dtype));
      task.from_dtype = from.dtype;
      task.stride = from.strides[3];
      task.count = from.dims[3];
      task.to = (which == 0 ? cache.keys() : cache.values()) + row * from.dims[3] * bytes;
      task.to_dtype = dtype;
      task.scale = scales ? scales + row : nullptr;
      kernels_->cache_row(task, scratch);
    }
  }
}

void Program::attention_tasks(const ReadyOp& ready, int64_t begin, int64_t end, char* scratch) const {
  const Cache* const cache = ready.cache;
  const View &q = ready.views[0], &bias = ready.views[3], &out = ready.views[cache ? 1 : 4];
  View k, v;
  if (cache) {
    for (View* view : {&k, &v}) {
      const int64_t dim = view == &k ? cache->shape().dim : cache->shape().value_dim;
      view->data = view == &k ? cache->keys() : cache->values();
      view->dtype = cache->shape().dtype;
      view->rank = 4;
      const int64_t dims[4] = {cache->shape().batch, cache->shape().heads, cache->slots(), dim};
      std::copy(dims, dims + 4, view->dims);
      view->strides[3] = 1;
      for (int d = 2; d >= 0; --d) view->strides[d] = view->strides[d + 1] * dims[d + 1];
    }
  } else {
    k = ready.views[1], v = ready.views[2];
  }
  const bool biased = !cache && ready.there[3];
  const View* const lse = ready.op->outputs.size() == 2 ? &ready.views[5] : nullptr;
  const int64_t group = q.dims[1] / k.dims[1], all_rows = q.dims[2] * group, most = kernels_->attention_rows;
  const int64_t tiles = (all_rows + most - 1) / most, slots = cache ? Cache::kMostRuns : ready.mask.most_runs();
  const int64_t bytes = static_cast<int64_t>(size_of(q.dtype)), kv_bytes = static_cast<int64_t>(size_of(k.dtype));
  const int64_t bias_bytes = biased ? static_cast<int64_t>(size_of(bias.dtype)) : 0;
  const MaskLengths lengths = {q.dims[0], q.dims[1], q.dims[2], k.dims[2]};

  Run* const runs = reinterpret_cast<Run*>(scratch);  // of every row, sorted and merged
  Run* const own = runs + slots * kMostRows;
  Run* const work = own + slots;
  int32_t* const first = reinterpret_cast<int32_t*>(work + (cache ? 0 : ready.mask.work_runs()));
  int32_t* const last = first + slots * kMostRows;
  char* const floats = reinterpret_cast<char*>(last + slots * kMostRows);
  float* const kernel_scratch =
      reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(floats) + 63) / 64 * 64);

  AttentionTile tile = {};
  tile.dtype = q.dtype;
  tile.bias_dtype = bias.dtype;
  tile.q_stride = q.strides[3];
  tile.out_stride = out.strides[3];
  tile.kv_dtype = k.dtype;
  tile.bias_stride = biased ? bias.strides[3] : 0;
  tile.k_row = k.strides[2];
  tile.k_stride = k.strides[3];
  tile.v_row = v.strides[2];
  tile.v_stride = v.strides[3];
  tile.dim = q.dims[3];
  tile.value_dim = v.dims[3];
  tile.scale = static_cast<float>(ready.op->floats[0]);
  tile.first = first;
  tile.last = last;
  tile.slots = slots;
  tile.runs = runs;

  for (int64_t task = begin; task < end; ++task) {
    // The last tiles first: under a causal mask they have the most keys, and long tasks should not come last.
    const int64_t t = tiles - 1 - task % tiles, kv_head = task / tiles % k.dims[1], b = task / tiles / k.dims[1];
    tile.rows = std::min(most, all_rows - t * most);
    tile.k = k.data + (b * k.strides[0] + kv_head * k.strides[1]) * kv_bytes;
    tile.v = v.data + (b * v.strides[0] + kv_head * v.strides[1]) * kv_bytes;
    if (cache && cache->key_scales()) {
      const int64_t first_row = (b * k.dims[1] + kv_head) * k.dims[2];
      tile.k_scales = cache->key_scales() + first_row;
      tile.v_scales = cache->value_scales() + first_row;
    }
    tile.run_count = 0;
    int64_t before = -1;
    for (int64_t r = 0; r < kMostRows; ++r) {
      if (r >= tile.rows) {  // rows that are not there attend to all, so that they never make a block partial
        for (int64_t slot = 0; slot < slots; ++slot) {
          first[slot * kMostRows + r] = 0;
          last[slot * kMostRows + r] = INT_MAX;
        }
        continue;
      }
      const int64_t query = (t * most + r) / group, head = kv_head * group + (t * most + r) % group;
      tile.q[r] = q.data + (b * q.strides[0] + head * q.strides[1] + query * q.strides[2]) * bytes;
      tile.out[r] = out.data + (b * out.strides[0] + head * out.strides[1] + query * out.strides[2]) * bytes;
      tile.lse[r] = nullptr;
      if (lse) {
        const int64_t at = b * lse->strides[0] + head * lse->strides[1] + query * lse->strides[2];
        tile.lse[r] = reinterpret_cast<float*>(lse->data) + at;
      }
      tile.bias[r] = nullptr;
      if (biased) {
        tile.bias[r] =
            bias.data + (b * bias.strides[0] + head * bias.strides[1] + query * bias.strides[2]) * bias_bytes;
      }
      const int64_t count = cache ? cache->runs(cache->position() + query, own)
                                  : ready.mask.runs(lengths, b, head, query, own, work);
      for (int64_t slot = 0; slot < slots; ++slot) {
        first[slot * kMostRows + r] = slot < count ? static_cast<int32_t>(own[slot].first) : 0;
        last[slot * kMostRows + r] = slot < count ? static_cast<int32_t>(own[slot].last) : 0;
      }
      if (count == before && std::memcmp(own, runs + tile.run_count - count, sizeof(Run) * count) == 0) continue;
      std::copy(own, own + count, runs + tile.run_count);
      tile.run_count += count;
      before = count;
    }
    std::sort(runs, runs + tile.run_count, [](const Run& a, const Run& c) { return a.first < c.first; });
    int64_t merged = 0;
    for (int64_t n = 0; n < tile.run_count; ++n) {
      if (merged > 0 && runs[n].first <= runs[merged - 1].last) {
        runs[merged - 1].last = std::max(runs[merged - 1].last, runs[n].last);
      } else {
        runs[merged++] = runs[n];
      }
    }
    tile.run_count = merged;
    kernels_->attention(tile, kernel_scratch);
  }
}

}  // namespace kernel_pytorch
