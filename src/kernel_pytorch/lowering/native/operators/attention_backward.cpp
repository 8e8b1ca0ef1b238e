// (q, k, v, out, lse, dout, -dlse) -> dq, dk, dv; ints: the code of the mask; floats: scale. Shapes and dtypes of the
// inputs and of dq are those of attention. dk and dv are in float32 and have parts x batch entries: the gradients of a
// batch entry are the sum over parts, each of which has its own tiles of rows, so that parts can run at the same time.
#include <algorithm>

#include "core/mask.h"
#include "operators/registry.h"
#include "operators/tile_ranges.h"

namespace kernel_pytorch {
namespace {

constexpr int64_t kMaxLength = int64_t{1} << 30;
constexpr int64_t kMaxHeadDim = 65536;
constexpr int64_t kMaxRows = int64_t{1} << 40;

enum Input { kQ, kK, kV, kOut, kLse, kDout, kDlse };
enum Output { kDq, kDk, kDv };

class AttentionBackward final : public Operator {
 public:
  bool check(LoadContext& /*context*/, Reason& reason) override {
    if (!has_operands(7, 6, 3) || !has_one_float()) return wrong_operands(reason);
    return mask_.read(op->ints.data(), op->ints.size(), reason);
  }

  bool resolve(Reason& reason) override {
    const View &q = inputs[kQ], &k = inputs[kK], &v = inputs[kV];
    const View &out = inputs[kOut], &dout = inputs[kDout], &dq = outputs[kDq];
    for (const View* view : {&q, &k, &v, &out, &dout, &dq}) {
      if (view->rank != 4 || view->dtype != q.dtype || !is_float(q.dtype)) {
        return reason.set("attention_backward takes tensors of four dimensions and the same floating-point dtype");
      }
    }
    const bool good = k.dims[0] == q.dims[0] && v.dims[0] == q.dims[0] && k.dims[1] > 0 && k.dims[1] == v.dims[1] &&
                      q.dims[1] % k.dims[1] == 0 && k.dims[2] == v.dims[2] && k.dims[3] == q.dims[3] && q.dims[3] > 0 &&
                      v.dims[3] > 0 && is_result(out) && is_result(dout) && same_shape(dq, q) && is_row(inputs[kLse]) &&
                      (!has_input[kDlse] || is_row(inputs[kDlse]));
    if (!good) return reason.set("the shapes of attention_backward's operands do not fit each other");
    if (k.dims[2] >= kMaxLength || q.dims[2] >= kMaxLength || q.dims[3] > kMaxHeadDim || v.dims[3] > kMaxHeadDim) {
      return reason.set("attention is limited to lengths below 2^30 and head dimensions up to 65536");
    }
    const View &dk = outputs[kDk], &dv = outputs[kDv];
    parts_ = q.dims[0] > 0 && dk.rank == 4 ? dk.dims[0] / q.dims[0] : 1;
    if (!is_total(dk, k) || !is_total(dv, v)) {
      return reason.set("dk and dv of attention_backward are contiguous, in float32, with a batch for each part");
    }
    int64_t rows;
    if (__builtin_mul_overflow(q.dims[2], q.dims[1] / k.dims[1], &rows) || rows > kMaxRows) {
      return reason.set("%s has too many rows", name);
    }
    lengths_ = {q.dims[0], q.dims[1], q.dims[2], k.dims[2]};
    if (!mask_.fits(lengths_, reason)) return false;
    if (q.numel() == 0 && k.numel() == 0 && v.numel() == 0) {
      schedule.tasks = 0;
    } else if (__builtin_mul_overflow(q.dims[0] * parts_, k.dims[1], &schedule.tasks)) {
      return reason.set("%s has too many heads", name);
    }
    schedule.tasks_per_claim = 1;
    schedule.scratch_bytes = TileRanges::bytes(mask_.max_ranges(), mask_.work_ranges(),
                                               kernels->attention_backward_scratch(q.dims[3], v.dims[3]));
    schedule.workers = q.numel() * std::min<int64_t>(k.dims[2], 64) > kParallelElements * 4 ? max_workers : 1;
    return true;
  }

  double cost() const override {
    const View& q = inputs[kQ];
    return 3.0 * static_cast<double>(q.numel()) * static_cast<double>(inputs[kK].dims[2]);
  }

  void run(int64_t begin, int64_t end, char* memory) const override {
    const View &q = inputs[kQ], &k = inputs[kK], &v = inputs[kV], &out = inputs[kOut], &dout = inputs[kDout];
    const View &dq = outputs[kDq], &lse = inputs[kLse];
    const int64_t kv_heads = k.dims[1], keys = k.dims[2], group = q.dims[1] / kv_heads, all_rows = q.dims[2] * group;
    const int64_t tile_rows = kernels->attention_rows, tiles = (all_rows + tile_rows - 1) / tile_rows;
    const auto at = [](const View& view, int64_t b, int64_t head, int64_t row) {
      const int64_t offset = b * view.strides[0] + head * view.strides[1] + row * view.strides[2];
      return view.data + offset * static_cast<int64_t>(size_of(view.dtype));
    };
    TileRanges ranges(memory, mask_.max_ranges(), mask_.work_ranges());
    AttentionBackwardTile own = {};
    AttentionTile& tile = own.tile;
    tile.dtype = tile.kv_dtype = q.dtype;
    tile.q_stride = q.strides[3];
    tile.out_stride = out.strides[3];
    tile.k_row = k.strides[2];
    tile.k_stride = k.strides[3];
    tile.v_row = v.strides[2];
    tile.v_stride = v.strides[3];
    tile.dim = q.dims[3];
    tile.value_dim = v.dims[3];
    tile.scale = static_cast<float>(op->floats[0]);
    own.dout_stride = dout.strides[3];
    own.dq_stride = dq.strides[3];

    for (int64_t task = begin; task < end; ++task) {
      const int64_t kv_head = task % kv_heads, entry = task / kv_heads;  // of dk and dv: a part has all batch entries
      const int64_t b = entry % q.dims[0], part = entry / q.dims[0];
      const int64_t dk_size = keys * tile.dim, dv_size = keys * tile.value_dim;
      own.dk = reinterpret_cast<float*>(outputs[kDk].data) + task * dk_size;
      own.dv = reinterpret_cast<float*>(outputs[kDv].data) + task * dv_size;
      std::fill(own.dk, own.dk + dk_size, 0.0f);
      std::fill(own.dv, own.dv + dv_size, 0.0f);
      tile.k = keys == 0 ? nullptr : at(k, b, kv_head, 0);
      tile.v = keys == 0 ? nullptr : at(v, b, kv_head, 0);
      for (int64_t t = part; t < tiles; t += parts_) {
        tile.rows = std::min(tile_rows, all_rows - t * tile_rows);
        ranges.clear();
        for (int64_t r = 0; r < tile.rows; ++r) {
          const int64_t query = (t * tile_rows + r) / group, head = kv_head * group + (t * tile_rows + r) % group;
          tile.q[r] = at(q, b, head, query);
          tile.out[r] = at(out, b, head, query);
          tile.lse[r] = reinterpret_cast<float*>(at(lse, b, head, query));
          own.dout[r] = at(dout, b, head, query);
          own.dlse[r] = has_input[kDlse] ? reinterpret_cast<float*>(at(inputs[kDlse], b, head, query)) : nullptr;
          own.dq[r] = at(dq, b, head, query);
          ranges.add_row(
              r, [&](KeyRange* into, KeyRange* work) { return mask_.ranges(lengths_, b, head, query, into, work); });
        }
        ranges.put_into(tile);
        kernels->attention_backward(own, ranges.kernel_scratch());
      }
    }
  }

 private:
  bool is_result(const View& view) const {
    return std::equal(view.dims, view.dims + 3, inputs[kQ].dims) && view.dims[3] == inputs[kV].dims[3];
  }

  bool is_row(const View& view) const {
    return view.rank == 3 && view.dtype == DType::kFloat32 && std::equal(view.dims, view.dims + 3, inputs[kQ].dims);
  }

  // Whether a view is the gradient of keys or values: contiguous, and with `parts_` times their batch.
  bool is_total(const View& view, const View& of) const {
    if (view.rank != 4 || view.dtype != DType::kFloat32 || parts_ < 1 || view.dims[0] != parts_ * of.dims[0]) {
      return false;
    }
    int64_t stride = 1;
    for (int d = 3; d >= 0; --d) {
      if ((d > 0 && view.dims[d] != of.dims[d]) || (view.dims[d] > 1 && view.strides[d] != stride)) return false;
      stride *= view.dims[d];
    }
    return true;
  }

  Mask mask_;
  MaskLengths lengths_ = {};
  int64_t parts_ = 1;
};

}  // namespace

std::unique_ptr<Operator> make_attention_backward() { return std::make_unique<AttentionBackward>(); }

}  // namespace kernel_pytorch
