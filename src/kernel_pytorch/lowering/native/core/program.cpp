#include "core/program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "core/crc32.h"
#include "core/shared.h"

namespace kernel_pytorch {
namespace {

using namespace format;

constexpr size_t kAlignment = 64;
constexpr int64_t kMostElements = int64_t{1} << 40;

bool op_is_well_formed(const Op& op, size_t caches, Reason& reason) {
  const size_t in = op.inputs.size(), out = op.outputs.size();
  const auto there = [&](size_t count) {
    return std::all_of(op.inputs.begin(), op.inputs.begin() + static_cast<int64_t>(count),
                       [](uint32_t value) { return value != kNone; });
  };
  const bool eps = op.floats.size() == 1 && std::isfinite(op.floats[0]) && op.floats[0] >= 0;
  const bool of_a_cache = op.ints.size() == 1 && op.ints[0] >= 0 && static_cast<size_t>(op.ints[0]) < caches;
  bool good = false;
  switch (op.code) {
    case kAttention:
      good = in == 4 && there(3) && (out == 1 || out == 2) && op.floats.size() == 1 && std::isfinite(op.floats[0]);
      break;
    case kRmsNorm:
      good = in == 2 && there(1) && out == 1 && eps && op.ints.empty();
      break;
    case kLayerNorm:
      good = in == 3 && there(1) && out == 1 && eps && op.ints.empty();
      break;
    case kLinear:
      good = in == 4 && there(2) && out == 1 && op.floats.empty() && op.ints.empty();
      break;
    case kCacheWrite:
      good = in == 3 && there(3) && out == 0 && op.floats.empty() && of_a_cache;
      break;
    case kCachedAttention:
      good = in == 1 && there(1) && out == 1 && op.floats.size() == 1 && std::isfinite(op.floats[0]) && of_a_cache;
      break;
    case kSoftmax:
      good = in == 1 && there(1) && out == 1 && op.floats.empty() && op.ints.empty();
      break;
    case kReduce:
      good = in == 1 && there(1) && out == 1 && op.floats.empty() && op.ints.size() == 1 && op.ints[0] >= 0 &&
             op.ints[0] < kReductions;
      break;
    case kPointwise: {
      // ints: the steps, then the register of each output.
      good = in <= kRegisters && there(in) && out >= 1 && out <= kRegisters && op.ints.size() >= out &&
             (op.ints.size() - out) % 4 == 0;
      for (size_t n = 0; good && n < op.ints.size() - out; n += 4) {
        const int64_t* step = op.ints.data() + n;
        const bool immediate = step[0] == kImmediate;
        const int64_t most = immediate ? static_cast<int64_t>(op.floats.size()) : kRegisters;
        good = step[0] >= 0 && step[0] < kSteps && step[1] >= 0 && step[1] < kRegisters && step[2] >= 0 &&
               step[2] < most && step[3] >= 0 && step[3] < kRegisters;
      }
      for (size_t n = op.ints.size() - std::min(out, op.ints.size()); good && n < op.ints.size(); ++n) {
        good = op.ints[n] >= 0 && op.ints[n] < kRegisters;
      }
      break;
    }
    default:
      return reason.set("op %u is unknown to this runtime: lower the model with its own version", op.code);
  }
  return good || reason.set("an op of kind %u has wrong operands", op.code);
}

}  // namespace

std::unique_ptr<Program> Program::load(const uint8_t* bytes, size_t size, const Host& host, Reason& reason) {
  std::unique_ptr<Program> program(new (std::nothrow) Program());
  if (!program) {
    reason.set("no memory for the program");
    return nullptr;
  }
  program->workers_ = std::clamp<int64_t>(host.workers, 1, 256);
  program->parallel_ = host.parallel;
  program->kernels_ = kernels(reason);
  if (program->kernels_ == nullptr) return nullptr;
  if (!read_payload(bytes, size, program->payload_, reason)) return nullptr;
  if (reinterpret_cast<uintptr_t>(program->payload_.constants) % 8 && program->payload_.constants_bytes > 0) {
    reason.set("the payload lies at an address that is not a multiple of 8");
    return nullptr;
  }
  return program->take_shared(host, reason) && program->prepare(reason) ? std::move(program) : nullptr;
}

bool Program::take_shared(const Host& host, Reason& reason) {
  for (const SharedConstant& constant : payload_.shared) {
    const uint8_t* const data = host.find ? host.find(host.context, constant.name, constant.bytes) : nullptr;
    const char* const name = constant.name.c_str();
    if (data == nullptr) return reason.set("the program's constant '%.80s' is not there", name);
    if (crc32(data, constant.bytes) != constant.crc) {
      return reason.set("the program's constant '%.80s' is damaged: its checksum is wrong", name);
    }
    shared_.push_back(reinterpret_cast<const char*>(data));
    if (reinterpret_cast<uintptr_t>(data) % kAlignment == 0) continue;
    copies_.push_back(shared_copy(host.owner, constant.name, data, constant.bytes, reason));
    if (!copies_.back()) return false;
    shared_.back() = copies_.back().get();
  }
  for (const CacheShape& shape : payload_.caches) {
    caches_.push_back(shared_cache(host.owner, shape, reason));
    if (!caches_.back()) return false;
  }
  std::vector<int> writers(payload_.caches.size());
  for (const Op& op : payload_.ops) {
    const bool writes = op.code == kCacheWrite && op.ints.size() == 1 && op.ints[0] >= 0;
    if (writes && static_cast<size_t>(op.ints[0]) < writers.size() && ++writers[static_cast<size_t>(op.ints[0])] > 1) {
      return reason.set("a cache is written twice in one run");
    }
  }
  return true;
}

bool Program::prepare(Reason& reason) {
  ops_.resize(payload_.ops.size());
  for (size_t n = 0; n < ops_.size(); ++n) {
    ReadyOp& ready = ops_[n];
    ready.op = &payload_.ops[n];
    if (!op_is_well_formed(*ready.op, caches_.size(), reason)) return false;
    if (ready.op->code == kAttention && !ready.mask.read(ready.op->ints.data(), ready.op->ints.size(), reason)) {
      return false;
    }
    const bool cached = ready.op->code == kCacheWrite || ready.op->code == kCachedAttention;
    if (cached) ready.cache = caches_[static_cast<size_t>(ready.op->ints[0])].get();
    if (ready.op->code == kPointwise) {
      for (double number : ready.op->floats) ready.immediates.push_back(static_cast<float>(number));
    }
  }
  symbols_.assign(payload_.symbols.size(), 0);
  numbers_.assign(payload_.expressions.size(), 0);
  input_shapes_.resize(payload_.inputs.size());
  output_shapes_.resize(payload_.outputs.size());
  input_data_.assign(payload_.inputs.size(), nullptr);
  output_data_.assign(payload_.outputs.size(), nullptr);

  // The largest lengths say how much memory every other needs.
  std::vector<int64_t> largest;
  for (const Symbol& symbol : payload_.symbols) largest.push_back(symbol.high);
  if (!resolve(largest, reason)) return false;
  size_t scratch = 0;
  for (const ReadyOp& ready : ops_) scratch = std::max(scratch, ready.scratch);
  scratch_bytes_ = (scratch + kAlignment - 1) / kAlignment * kAlignment;
  // Vectors that straddle two lines of the cache slow a matrix product down: constants that a loader put at an odd
  // address are copied, once.
  const bool odd = reinterpret_cast<uintptr_t>(payload_.constants) % kAlignment != 0;
  const uint64_t copied = odd ? payload_.constants_bytes : 0;
  const uint64_t all =
      payload_.arena_bytes + copied + scratch_bytes_ * static_cast<uint64_t>(workers_) + 3 * kAlignment;
  memory_.reset(new (std::nothrow) char[all]);
  if (!memory_) return reason.set("no memory: the program needs %llu bytes", (unsigned long long)all);
  const auto aligned = [](char* p) {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + kAlignment - 1) / kAlignment * kAlignment);
  };
  arena_ = aligned(memory_.get());
  scratch_ = aligned(arena_ + payload_.arena_bytes);
  if (copied > 0) {
    char* const own = aligned(scratch_ + scratch_bytes_ * static_cast<size_t>(workers_));
    std::memcpy(own, payload_.constants, copied);
    payload_.constants = reinterpret_cast<const uint8_t*>(own);
  }
  resolved_ = false;
  return true;
}

bool Program::evaluate(const std::vector<int64_t>& symbols, Reason& reason) {
  for (size_t n = 0; n < payload_.expressions.size(); ++n) {
    int64_t stack[16];
    int top = 0;
    for (const ExpressionToken& token : payload_.expressions[n]) {
      if (token.kind == kConstantToken || token.kind == kSymbolToken) {
        stack[top++] = token.kind == kConstantToken ? token.value : symbols[static_cast<size_t>(token.value)];
        continue;
      }
      const int64_t b = stack[--top], a = stack[top - 1];
      int64_t found = 0;
      bool bad = false;
      if (token.kind == kAdd) bad = __builtin_add_overflow(a, b, &found);
      if (token.kind == kMultiply) bad = __builtin_mul_overflow(a, b, &found);
      if (token.kind == kFloorDivide || token.kind == kModulo) {
        bad = b <= 0 || a < 0;
        if (!bad) found = token.kind == kFloorDivide ? a / b : a % b;
      }
      if (bad) return reason.set("a shape cannot be computed from these lengths");
      stack[top - 1] = found;
    }
    numbers_[n] = stack[0];
  }
  return true;
}

int64_t Program::buffer_elements(const Buffer& buffer) const {
  if (buffer.kind == kInput) return input_shapes_[buffer.index].numel();
  if (buffer.kind == kOutput) return output_shapes_[buffer.index].numel();
  return static_cast<int64_t>(buffer.bytes / size_of(buffer.dtype));
}

char* Program::buffer_data(const Buffer& buffer) const {
  switch (buffer.kind) {
    case kInput:
      return static_cast<char*>(input_data_[buffer.index]);
    case kOutput:
      return static_cast<char*>(output_data_[buffer.index]);
    case kArena:
      return arena_ + buffer.offset;
    case kShared:
      return const_cast<char*>(shared_[buffer.index]);
    default:
      return const_cast<char*>(reinterpret_cast<const char*>(payload_.constants)) + buffer.offset;
  }
}

// The view without its data, inside its buffer whatever the payload says.
bool Program::resolve_value(uint32_t index, View& view, Reason& reason) const {
  const Value& value = payload_.values[index];
  const Buffer& buffer = payload_.buffers[value.buffer];
  view.dtype = buffer.dtype;
  view.rank = static_cast<int32_t>(value.dims.size());
  int64_t last = numbers_[value.offset], count = 1;
  bool bad = last < 0;
  for (int d = 0; d < view.rank; ++d) {
    const int64_t size = numbers_[value.dims[d]], stride = numbers_[value.strides[d]];
    view.dims[d] = size;
    view.strides[d] = stride;
    int64_t reach;
    bad = bad || size < 0 || stride < 0 || __builtin_mul_overflow(std::max<int64_t>(size - 1, 0), stride, &reach) ||
          __builtin_add_overflow(last, reach, &last) || __builtin_mul_overflow(count, size, &count) ||
          count > kMostElements;
    if (bad) break;
  }
  if (bad || (count > 0 && last >= buffer_elements(buffer))) return reason.set("a value reaches beyond its buffer");
  return true;
}

bool Program::resolve(const std::vector<int64_t>& symbols, Reason& reason) {
  resolved_ = false;
  if (!evaluate(symbols, reason)) return false;
  const auto shape = [&](const Parameter& parameter, View& view) {
    view.dtype = parameter.dtype;
    view.rank = static_cast<int32_t>(parameter.dims.size());
    int64_t count = 1;
    for (int d = 0; d < view.rank; ++d) {
      view.dims[d] = numbers_[parameter.dims[d]];
      if (view.dims[d] < 0 || view.dims[d] > INT32_MAX || __builtin_mul_overflow(count, view.dims[d], &count) ||
          count > kMostElements) {
        return reason.set("'%.64s' would have a dimension of %lld", parameter.name.c_str(), (long long)view.dims[d]);
      }
    }
    return true;
  };
  for (size_t n = 0; n < payload_.inputs.size(); ++n) {
    if (!shape(payload_.inputs[n], input_shapes_[n])) return false;
  }
  for (size_t n = 0; n < payload_.outputs.size(); ++n) {
    if (!shape(payload_.outputs[n], output_shapes_[n])) return false;
  }
  for (ReadyOp& ready : ops_) {
    if (!resolve_op(ready, reason)) return false;
  }
  if (&symbols != &symbols_) symbols_ = symbols;
  resolved_ = true;
  return true;
}

bool Program::bind(const Argument* inputs, Reason& reason) {
  for (size_t n = 0; n < payload_.inputs.size(); ++n) {
    const Parameter& wanted = payload_.inputs[n];
    const Argument& given = inputs[n];
    const char* name = wanted.name.c_str();
    if ((wanted.kind == kInteger) != given.is_integer) return reason.set("input '%.64s' is of another kind", name);
    if (given.is_integer) continue;
    if (given.dtype != wanted.dtype) {
      return reason.set("input '%.64s' is %s; it must be %s", name, name_of(given.dtype), name_of(wanted.dtype));
    }
    if (static_cast<size_t>(given.rank) != wanted.dims.size()) {
      return reason.set("input '%.64s' has %d dimensions; it must have %zu", name, given.rank, wanted.dims.size());
    }
    input_data_[n] = given.data;
  }
  bool changed = !resolved_;
  for (size_t n = 0; n < payload_.symbols.size(); ++n) {
    const Symbol& symbol = payload_.symbols[n];
    const Argument& given = inputs[symbol.input];
    const int64_t found = given.is_integer ? given.integer : given.dims[symbol.dim];
    if (found < symbol.low || found > symbol.high) {
      return reason.set("input '%.64s' has %lld in dimension %u; it was lowered for %lld to %lld",
                        payload_.inputs[symbol.input].name.c_str(), (long long)found, symbol.dim,
                        (long long)symbol.low, (long long)symbol.high);
    }
    changed = changed || found != symbols_[n];
  }
  if (changed) {
    for (size_t n = 0; n < payload_.symbols.size(); ++n) {
      const Symbol& symbol = payload_.symbols[n];
      const Argument& given = inputs[symbol.input];
      symbols_[n] = given.is_integer ? given.integer : given.dims[symbol.dim];
    }
    if (!resolve(symbols_, reason)) return false;
  }
  for (size_t n = 0; n < payload_.inputs.size(); ++n) {
    for (int d = 0; !inputs[n].is_integer && d < inputs[n].rank; ++d) {
      if (inputs[n].dims[d] != input_shapes_[n].dims[d]) {
        return reason.set("input '%.64s' has %lld in dimension %d; it must be %lld", payload_.inputs[n].name.c_str(),
                          (long long)inputs[n].dims[d], d, (long long)input_shapes_[n].dims[d]);
      }
    }
  }
  return true;
}

}  // namespace kernel_pytorch
