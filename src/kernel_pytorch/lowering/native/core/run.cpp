// Shapes of each op, and its work cut into tasks for the workers.
#include <algorithm>
#include <cstring>

#include "core/program.h"

namespace kernel_pytorch {
namespace {

using namespace format;

bool is_row_op(uint32_t code) {
  return code == kRmsNorm || code == kLayerNorm || code == kSoftmax || code == kReduce;
}

bool same_shape(const View& a, const View& b) {
  return a.rank == b.rank && std::equal(a.dims, a.dims + a.rank, b.dims);
}

}  // namespace

bool Program::resolve_op(ReadyOp& ready, Reason& reason) {
  const Op& op = *ready.op;
  const size_t inputs = op.inputs.size();
  for (size_t n = 0; n < inputs + op.outputs.size(); ++n) {
    const uint32_t value = n < inputs ? op.inputs[n] : op.outputs[n - inputs];
    ready.there[n] = value != kNone;
    if (ready.there[n] && !resolve_value(value, ready.views[n], reason)) return false;
    // Two threads must not write one number, and a result must not be larger than its memory.
    for (int d = 0; n >= inputs && d < ready.views[n].rank; ++d) {
      if (ready.views[n].dims[d] > 1 && ready.views[n].strides[d] == 0) {
        return reason.set("an op writes a number more than once");
      }
    }
  }
  ready.tasks = 0;
  ready.scratch = 0;
  bool good;
  switch (op.code) {
    case kAttention:
      good = resolve_attention(ready, reason);
      break;
    case kPointwise:
      good = resolve_pointwise(ready, reason);
      break;
    case kLinear:
      good = resolve_linear(ready, reason);
      break;
    case kCacheWrite:
      good = resolve_cache_write(ready, reason);
      break;
    case kCachedAttention:
      good = resolve_cached_attention(ready, reason);
      break;
    default:
      good = resolve_row_op(ready, reason);
  }
  // Memory was set aside for the largest lengths; shapes that need more are a fault of the payload.
  if (good && memory_ && ready.scratch > scratch_bytes_) return reason.set("an op needs more memory than was planned");
  return good;
}

bool Program::resolve_row_op(ReadyOp& ready, Reason& reason) {
  const Op& op = *ready.op;
  const View &in = ready.views[0], &out = ready.views[op.inputs.size()];
  if (in.rank < 1 || !is_float(in.dtype) || !is_float(out.dtype)) {
    return reason.set("an op along rows takes floating numbers of at least one dimension");
  }
  const int64_t count = in.dims[in.rank - 1];
  if (count < 1 || count > (int64_t{1} << 32)) return reason.set("a row has %lld numbers", (long long)count);
  if (op.code == kReduce) {
    if (out.rank != in.rank || out.dims[out.rank - 1] != 1 || !std::equal(in.dims, in.dims + in.rank - 1, out.dims)) {
      return reason.set("a reduction's result has another shape than its rows");
    }
  } else if (!same_shape(in, out)) {
    return reason.set("an op along rows has a result of another shape");
  }
  for (size_t n = 1; n < op.inputs.size(); ++n) {
    const View& own = ready.views[n];
    if (ready.there[n] && (own.rank != 1 || own.dims[0] != count || !is_float(own.dtype))) {
      return reason.set("a norm's weights do not fit its rows");
    }
  }
  ready.tasks = in.numel() / count;
  ready.workers = in.numel() > kWorthAThread ? workers_ : 1;
  ready.tasks_at_once = share(ready.tasks, ready.workers);
  ready.scratch = static_cast<size_t>(count) * 3 * sizeof(float);
  return true;
}

bool Program::resolve_linear(ReadyOp& ready, Reason& reason) {
  const View &x = ready.views[0], &weights = ready.views[1], &bias = ready.views[2], &scales = ready.views[3],
             &y = ready.views[4];
  const bool quantized = weights.dtype == DType::kInt8;
  const bool formats = x.dtype == DType::kFloat32 && (quantized || is_float(weights.dtype)) && y.dtype == DType::kFloat32;
  if (!formats || x.rank < 1 || y.rank != x.rank || weights.rank != 3 || !std::equal(x.dims, x.dims + x.rank - 1, y.dims)) {
    return reason.set("a linear's operands do not fit each other");
  }
  const int64_t inputs = x.dims[x.rank - 1], outputs = y.dims[y.rank - 1];
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  const bool packed = weights.dims[0] == panels && weights.dims[1] == inputs && weights.dims[2] == kPanel &&
                      weights.strides[2] == 1 && weights.strides[1] == kPanel && weights.strides[0] == inputs * kPanel;
  const auto whole_rows = [](const View& view) { return view.strides[view.rank - 1] == 1 || view.dims[view.rank - 1] == 1; };
  if (inputs < 1 || outputs < 1 || !packed || !whole_rows(x) || !whole_rows(y)) {
    return reason.set("a linear's weights are not packed, or its rows are not whole");
  }
  for (const View* row : {&bias, &scales}) {
    if (ready.there[row == &bias ? 2 : 3] && (row->rank != 1 || row->dims[0] != outputs ||
                                              row->dtype != DType::kFloat32 || (row->strides[0] != 1 && outputs != 1))) {
      return reason.set("a linear's bias or scales do not fit its outputs");
    }
  }
  if (quantized != ready.there[3]) return reason.set("a linear has scales without quantized weights, or none with them");
  ready.scratch = weights.dtype == DType::kFloat32 ? 0 : static_cast<size_t>(inputs) * kPanel * sizeof(float);
  const int64_t rows = x.numel() / inputs;
  // As many rows as stay in the second cache beside a panel, and few enough that every worker has some.
  int64_t most = std::clamp<int64_t>(65536 / inputs, 12, kMostLinearRows) / 12 * 12;
  while (most > 12 && (rows + most - 1) / most * panels < workers_ * 4) most -= 12;
  ready.rows_a_task = most;
  ready.tasks = (rows + most - 1) / most * panels;
  ready.workers = static_cast<double>(x.numel()) * static_cast<double>(outputs) > kWorthAThread * 16.0 ? workers_ : 1;
  ready.tasks_at_once = std::clamp<int64_t>(ready.tasks / (ready.workers * 8), 1, panels);
  return true;
}

bool Program::resolve_pointwise(ReadyOp& ready, Reason& reason) {
  const Op& op = *ready.op;
  PointwiseLoop& loop = ready.loop;
  loop.inputs = static_cast<int32_t>(op.inputs.size());
  loop.outputs = static_cast<int32_t>(op.outputs.size());
  const View& first = ready.views[loop.inputs];
  for (int n = 0; n < loop.inputs + loop.outputs; ++n) {
    const View& view = ready.views[n];
    if (!same_shape(view, first)) return reason.set("a pointwise op's operands differ in shape");
    if (!is_float(view.dtype) && !(n < loop.inputs && view.dtype == DType::kBool)) {
      return reason.set("a pointwise op takes floating numbers, not %s", name_of(view.dtype));
    }
  }
  // Neighbouring dimensions become one where every operand walks them as one.
  const auto strides = [&](int n) { return n < loop.inputs ? loop.in_strides[n] : loop.out_strides[n - loop.inputs]; };
  loop.rank = 0;
  for (int d = 0; d < first.rank; ++d) {
    if (first.dims[d] == 1) continue;
    bool merge = loop.rank > 0;
    for (int n = 0; merge && n < loop.inputs + loop.outputs; ++n) {
      merge = strides(n)[loop.rank - 1] == ready.views[n].strides[d] * first.dims[d];
    }
    if (!merge) loop.dims[loop.rank++] = 1;
    loop.dims[loop.rank - 1] *= first.dims[d];
    for (int n = 0; n < loop.inputs + loop.outputs; ++n) strides(n)[loop.rank - 1] = ready.views[n].strides[d];
  }
  if (loop.rank == 0) {
    loop.rank = 1;
    loop.dims[0] = 1;
    for (int n = 0; n < loop.inputs + loop.outputs; ++n) strides(n)[0] = 0;
  }
  for (int n = 0; n < loop.inputs; ++n) loop.in_dtype[n] = ready.views[n].dtype;
  for (int n = 0; n < loop.outputs; ++n) loop.out_dtype[n] = ready.views[loop.inputs + n].dtype;
  loop.steps = op.ints.data();
  loop.step_count = static_cast<int64_t>((op.ints.size() - op.outputs.size()) / 4);
  loop.out_registers = op.ints.data() + loop.step_count * 4;
  loop.immediates = ready.immediates.data();
  const int64_t numel = first.numel(), width = loop.dims[loop.rank - 1];
  ready.tasks = numel == 0 ? 0 : numel / width * ((width + kChunk - 1) / kChunk);
  ready.workers = numel > kWorthAThread ? workers_ : 1;
  ready.tasks_at_once = share(ready.tasks, ready.workers);
  ready.scratch = kRegisters * kChunk * sizeof(float);
  return true;
}

double Program::cost() const {
  double total = 0;
  for (const ReadyOp& ready : ops_) {
    const View& in = ready.views[0];
    double own = static_cast<double>(ready.tasks) * (ready.op->code == kPointwise ? kChunk : 1);
    if (ready.op->code == kAttention) {
      own *= static_cast<double>(kernels_->attention_rows) * static_cast<double>(ready.views[1].dims[2]) *
             static_cast<double>(in.dims[3] + ready.views[2].dims[3]);
    } else if (ready.op->code == kCachedAttention) {
      own *= static_cast<double>(kernels_->attention_rows) * static_cast<double>(ready.cache->slots()) *
             static_cast<double>(in.dims[3] + ready.views[1].dims[3]);
    } else if (ready.op->code == kLinear) {
      own *= static_cast<double>(ready.rows_a_task * kPanel) * static_cast<double>(in.dims[in.rank - 1]);
    } else if (ready.op->code != kPointwise) {
      own *= static_cast<double>(in.dims[in.rank - 1]);
    }
    total += own;
  }
  return total;
}

// The data of the op's views, now that inputs and outputs are known.
void Program::point(ReadyOp& ready) {
  const Op& op = *ready.op;
  const size_t inputs = op.inputs.size();
  for (size_t n = 0; n < inputs + op.outputs.size(); ++n) {
    if (!ready.there[n]) continue;
    const Value& value = payload_.values[n < inputs ? op.inputs[n] : op.outputs[n - inputs]];
    View& view = ready.views[n];
    char* const data = buffer_data(payload_.buffers[value.buffer]);
    view.data = data + numbers_[value.offset] * static_cast<int64_t>(size_of(view.dtype));
    if (op.code != kPointwise) continue;
    if (n < inputs) {
      ready.loop.in[n] = view.data;
    } else {
      ready.loop.out[n - inputs] = view.data;
    }
  }
}

bool Program::run(void* const* outputs, Reason& reason) {
  if (!resolved_) return reason.set("inputs must be bound before the program runs");
  for (size_t n = 0; n < output_data_.size(); ++n) output_data_[n] = outputs[n];
  // Every position before any op: a call that is refused leaves the caches as they were.
  for (ReadyOp& ready : ops_) {
    if (ready.op->code != kCacheWrite) continue;
    point(ready);
    std::memcpy(&ready.position, ready.views[2].data, sizeof(ready.position));
    if (!ready.cache->accepts(ready.position, ready.views[0].dims[2], reason)) return false;
  }
  for (ReadyOp& ready : ops_) {
    if (ready.op->code == kCacheWrite) ready.cache->advance(ready.position, ready.views[0].dims[2]);
    if (ready.tasks == 0) continue;
    point(ready);
    running_ = &ready;
    next_.store(0, std::memory_order_relaxed);
    const int64_t workers = std::min(ready.workers, (ready.tasks + ready.tasks_at_once - 1) / ready.tasks_at_once);
    if (workers > 1 && parallel_ != nullptr) {
      parallel_(workers, &Program::work, this);
    } else {
      work(this, 0);
    }
  }
  return true;
}

void Program::work(void* context, int64_t worker) {
  Program& self = *static_cast<Program*>(context);
  const ReadyOp& ready = *self.running_;
  char* const scratch = self.scratch_ + static_cast<size_t>(worker) * self.scratch_bytes_;
  float* const floats = reinterpret_cast<float*>(scratch);
  RowOp row = {};
  if (is_row_op(ready.op->code)) {
    const size_t inputs = ready.op->inputs.size();
    row.code = ready.op->code;
    row.reduction = ready.op->ints.empty() ? 0 : ready.op->ints[0];
    row.in = ready.views[0];
    row.out = ready.views[inputs];
    row.weight = inputs > 1 && ready.there[1] ? &ready.views[1] : nullptr;
    row.bias = inputs > 2 && ready.there[2] ? &ready.views[2] : nullptr;
    row.eps = ready.op->floats.empty() ? 0.0f : static_cast<float>(ready.op->floats[0]);
  }
  for (;;) {
    const int64_t begin = self.next_.fetch_add(ready.tasks_at_once, std::memory_order_relaxed);
    if (begin >= ready.tasks) return;
    const int64_t end = std::min(ready.tasks, begin + ready.tasks_at_once);
    if (ready.op->code == kAttention || ready.op->code == kCachedAttention) {
      self.attention_tasks(ready, begin, end, scratch);
    } else if (ready.op->code == kLinear) {
      self.linear_tasks(ready, begin, end, floats);
    } else if (ready.op->code == kCacheWrite) {
      self.cache_tasks(ready, begin, end, floats);
    } else if (ready.op->code == kPointwise) {
      self.kernels_->pointwise(ready.loop, begin, end, floats);
    } else {
      self.kernels_->row_op(row, begin, end, floats);
    }
  }
}

namespace {

int64_t row_start(const View& view, int64_t row) {
  int64_t offset = 0;
  for (int d = view.rank - 2; d >= 0; --d) {
    offset += row % view.dims[d] * view.strides[d];
    row /= view.dims[d];
  }
  return offset;
}

}  // namespace

void Program::linear_tasks(const ReadyOp& ready, int64_t begin, int64_t end, float* scratch) const {
  const View &x = ready.views[0], &weights = ready.views[1], &y = ready.views[4];
  const int64_t panels = weights.dims[0];
  LinearTask task;
  task.inputs = x.dims[x.rank - 1];
  task.outputs = y.dims[y.rank - 1];
  task.scales = ready.there[3] ? reinterpret_cast<const float*>(ready.views[3].data) : nullptr;
  task.bias = ready.there[2] ? reinterpret_cast<const float*>(ready.views[2].data) : nullptr;
  const int64_t all = x.numel() / task.inputs;
  int64_t block = -1;
  for (int64_t n = begin; n < end; ++n) {
    if (n / panels != block) {
      block = n / panels;
      task.rows = std::min(ready.rows_a_task, all - block * ready.rows_a_task);
      for (int64_t r = 0; r < task.rows; ++r) {
        const int64_t row = block * ready.rows_a_task + r;
        task.x[r] = reinterpret_cast<const float*>(x.data) + row_start(x, row);
        task.y[r] = reinterpret_cast<float*>(y.data) + row_start(y, row);
      }
    }
    task.panel = n % panels;
    const int64_t panel_size = task.inputs * kPanel;
    const char* const packed = weights.data + task.panel * panel_size * static_cast<int64_t>(size_of(weights.dtype));
    if (weights.dtype == DType::kFloat32) {
      task.weights = reinterpret_cast<const float*>(packed);
    } else {
      kernels_->unpack(packed, weights.dtype, scratch, panel_size);
      task.weights = scratch;
    }
    kernels_->linear(task);
  }
}

}  // namespace kernel_pytorch
