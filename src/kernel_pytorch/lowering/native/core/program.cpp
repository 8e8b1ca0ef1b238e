// Loading, binding and running a program. resolve.cpp computes its shapes.
#include "core/program.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/crc32.h"
#include "core/shared.h"

namespace kernel_pytorch {
namespace {

using format::ArgumentKind;
using format::BufferKind;
using format::kAlignment;

bool is_aligned(const void* p, uint64_t alignment) { return reinterpret_cast<uintptr_t>(p) % alignment == 0; }

int64_t value_of(const Symbol& symbol, const Argument* inputs) {
  const Argument& given = inputs[symbol.input];
  return given.is_integer ? given.integer : given.dims[symbol.dim];
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
  if (program->payload_.constants_bytes > 0 && !is_aligned(program->payload_.constants, 8)) {
    reason.set("the payload lies at an address that is not a multiple of 8");
    return nullptr;
  }
  const bool good = program->load_shared(host, reason) && program->make_operators(reason) && program->allocate(reason);
  return good ? std::move(program) : nullptr;
}

bool Program::load_shared(const Host& host, Reason& reason) {
  for (const SharedConstant& constant : payload_.shared) {
    const uint8_t* const data = host.find ? host.find(host.context, constant.name, constant.bytes) : nullptr;
    const char* const name = constant.name.c_str();
    if (data == nullptr) return reason.set("the program's constant '%.80s' is missing", name);
    if (!host.verified && crc32(data, constant.bytes) != constant.crc) {
      return reason.set("the program's constant '%.80s' is damaged: its checksum is wrong", name);
    }
    shared_.push_back(reinterpret_cast<const char*>(data));
    if (is_aligned(data, kAlignment)) continue;
    copies_.push_back(shared_copy(host.owner, constant.name, data, constant.bytes, reason));
    if (!copies_.back()) return false;
    shared_.back() = copies_.back().get();
  }
  for (const CacheShape& shape : payload_.caches) {
    caches_.push_back(shared_cache(host.owner, shape, reason));
    if (!caches_.back()) return false;
  }
  return true;
}

bool Program::make_operators(Reason& reason) {
  LoadContext context{payload_, caches_, std::vector<bool>(caches_.size())};
  for (const Op& op : payload_.ops) {
    const OperatorEntry* const entry = find_operator(op.code);
    if (entry == nullptr) {
      return reason.set("op code %u is unknown to this runtime: lower the model with its own version", op.code);
    }
    if (op.inputs.size() > kMaxOperands || op.outputs.size() > kMaxOperands) {
      return reason.set("%s has more than %zu operands", entry->name, kMaxOperands);
    }
    ops_.push_back(entry->make());
    Operator& made = *ops_.back();
    made.name = entry->name;
    made.op = &op;
    made.kernels = kernels_;
    made.max_workers = workers_;
    if (!made.check(context, reason)) return false;
  }
  return true;
}

bool Program::allocate(Reason& reason) {
  sizes_.assign(payload_.expressions.size(), 0);
  input_shapes_.resize(payload_.inputs.size());
  output_shapes_.resize(payload_.outputs.size());
  input_data_.assign(payload_.inputs.size(), nullptr);
  output_data_.assign(payload_.outputs.size(), nullptr);

  // The largest lengths need the most memory.
  std::vector<int64_t> largest;
  for (const Symbol& symbol : payload_.symbols) largest.push_back(symbol.high);
  if (!resolve(largest, reason)) return false;
  size_t scratch = 0;
  for (const auto& op : ops_) {
    scratch = std::max(scratch, op->schedule.scratch_bytes);
    workspace_bytes_ = std::max(workspace_bytes_, op->schedule.workspace_bytes);
  }
  scratch_bytes_ = (scratch + kAlignment - 1) / kAlignment * kAlignment;
  // Copy constants that the loader put at an unaligned address: vector loads that straddle cache lines are slow.
  const uint64_t copied = is_aligned(payload_.constants, kAlignment) ? 0 : payload_.constants_bytes;
  const uint64_t total = payload_.arena_bytes + copied + scratch_bytes() + 4 * kAlignment;
  memory_.reset(new (std::nothrow) char[total]);
  if (!memory_) {
    return reason.set("no memory: the program needs %llu bytes", static_cast<unsigned long long>(total));
  }
  arena_ = align_up(memory_.get());
  scratch_ = align_up(arena_ + payload_.arena_bytes);
  workspace_ = align_up(scratch_ + scratch_bytes_ * static_cast<size_t>(workers_));
  if (copied > 0) {
    char* const copy = align_up(workspace_ + workspace_bytes_);
    std::memcpy(copy, payload_.constants, copied);
    payload_.constants = reinterpret_cast<const uint8_t*>(copy);
  }
  resolved_ = false;
  return true;
}

bool Program::bind(const Argument* inputs, Reason& reason) {
  for (size_t n = 0; n < payload_.inputs.size(); ++n) {
    const Parameter& wanted = payload_.inputs[n];
    const Argument& given = inputs[n];
    const char* name = wanted.name.c_str();
    const bool integer = wanted.kind == ArgumentKind::kInteger;
    if (integer != given.is_integer) {
      return reason.set("input '%.64s' must be %s", name, integer ? "an integer" : "a tensor");
    }
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
    const int64_t size = value_of(symbol, inputs);
    if (size < symbol.low || size > symbol.high) {
      return reason.set("input '%.64s' has %lld in dimension %u; it was lowered for %lld to %lld",
                        payload_.inputs[symbol.input].name.c_str(), static_cast<long long>(size), symbol.dim,
                        static_cast<long long>(symbol.low), static_cast<long long>(symbol.high));
    }
    changed = changed || size != symbols_[n];
  }
  if (changed) {
    for (size_t n = 0; n < payload_.symbols.size(); ++n) symbols_[n] = value_of(payload_.symbols[n], inputs);
    if (!resolve(symbols_, reason)) return false;
  }
  for (size_t n = 0; n < payload_.inputs.size(); ++n) {
    for (int d = 0; !inputs[n].is_integer && d < inputs[n].rank; ++d) {
      if (inputs[n].dims[d] != input_shapes_[n].dims[d]) {
        return reason.set("input '%.64s' has %lld in dimension %d; it must be %lld", payload_.inputs[n].name.c_str(),
                          static_cast<long long>(inputs[n].dims[d]), d,
                          static_cast<long long>(input_shapes_[n].dims[d]));
      }
    }
  }
  return true;
}

double Program::cost() const {
  double total = 0;
  for (const auto& op : ops_) total += op->cost();
  return total;
}

char* Program::buffer_data(const Buffer& buffer) const {
  switch (buffer.kind) {
    case BufferKind::kInput:
      return static_cast<char*>(input_data_[buffer.index]);
    case BufferKind::kOutput:
      return static_cast<char*>(output_data_[buffer.index]);
    case BufferKind::kArena:
      return arena_ + buffer.offset;
    case BufferKind::kShared:
      return const_cast<char*>(shared_[buffer.index]);
    default:
      return const_cast<char*>(reinterpret_cast<const char*>(payload_.constants)) + buffer.offset;
  }
}

// Sets the data of all operands, now that inputs and outputs are known.
void Program::set_data(Operator& op) const {
  const auto set = [&](uint32_t index, View& view) {
    const Value& value = payload_.values[index];
    view.data = buffer_data(payload_.buffers[value.buffer]);
    // The offset of an empty view is not bounded by its buffer.
    if (view.numel() > 0) view.data += sizes_[value.offset] * static_cast<int64_t>(size_of(view.dtype));
  };
  for (size_t n = 0; n < op.op->inputs.size(); ++n) {
    if (op.has_input[n]) set(op.op->inputs[n], op.inputs[n]);
  }
  for (size_t n = 0; n < op.op->outputs.size(); ++n) set(op.op->outputs[n], op.outputs[n]);
}

bool Program::run(void* const* outputs, Reason& reason) {
  if (!resolved_) return reason.set("inputs must be bound before the program runs");
  for (size_t n = 0; n < output_data_.size(); ++n) output_data_[n] = outputs[n];
  for (const auto& op : ops_) {
    set_data(*op);
    if (!op->accept(reason)) return false;
  }
  for (const auto& op : ops_) {
    op->workspace = workspace_;
    op->start();
    run_tasks(*op, op->schedule.start_tasks, 1, true);
    run_tasks(*op, op->schedule.tasks, op->schedule.tasks_per_claim, false);
  }
  return true;
}

void Program::run_tasks(const Operator& op, int64_t tasks, int64_t tasks_per_claim, bool preparing) {
  if (tasks == 0) return;
  running_ = &op;
  tasks_ = tasks;
  tasks_per_claim_ = tasks_per_claim;
  preparing_ = preparing;
  next_task_.store(0, std::memory_order_relaxed);
  const int64_t workers = std::min(op.schedule.workers, (tasks + tasks_per_claim - 1) / tasks_per_claim);
  if (workers > 1 && parallel_ != nullptr) {
    parallel_(workers, &Program::work, this);
  } else {
    work(this, 0);
  }
}

void Program::work(void* context, int64_t worker) {
  Program& self = *static_cast<Program*>(context);
  const Operator& op = *self.running_;
  char* const scratch = self.scratch_ + static_cast<size_t>(worker) * self.scratch_bytes_;
  for (;;) {
    const int64_t begin = self.next_task_.fetch_add(self.tasks_per_claim_, std::memory_order_relaxed);
    if (begin >= self.tasks_) return;
    const int64_t end = std::min(self.tasks_, begin + self.tasks_per_claim_);
    if (self.preparing_) {
      for (int64_t task = begin; task < end; ++task) op.prepare(task);
    } else {
      op.run(begin, end, scratch);
    }
  }
}

}  // namespace kernel_pytorch
