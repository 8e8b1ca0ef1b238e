// The interface that every file in operators/ implements. operators/registry.cpp lists the implementations.
//
// A payload is data: nothing in it is trusted. `check` and `resolve` must reject every operand that `run` could not
// handle, because `run` reads and writes memory without further checks.
#pragma once

#include <memory>
#include <vector>

#include "core/cache.h"
#include "core/payload.h"
#include "kernels/table.h"

namespace kernel_pytorch {

constexpr size_t kMaxOperands = format::kRegisters;  // of inputs, and of outputs

// How the work of one op is split among workers. Tasks are independent of each other.
struct Schedule {
  int64_t tasks = 0;
  int64_t tasks_per_claim = 1;  // a worker claims this many at a time
  int64_t workers = 1;
  int64_t start_tasks = 0;     // of prepare(), all done before the others begin; on as many workers
  size_t scratch_bytes = 0;    // per worker
  size_t workspace_bytes = 0;  // shared by all workers

  // One task per row, on several workers if `elements` are enough to pay for waking them.
  void split_rows(int64_t rows, int64_t elements, int64_t max_workers);
};

// Below this number of elements, waking a thread costs more than it saves.
constexpr int64_t kParallelElements = 16384;

// What check() may refer to besides the op itself.
struct LoadContext {
  const Payload& payload;
  const std::vector<std::shared_ptr<Cache>>& caches;
  std::vector<bool> written;  // per cache: whether an earlier op writes it
};

class Operator {
 public:
  virtual ~Operator() = default;

  // Validates what does not depend on shapes: the number of operands, `ints` and `floats`. Called once, on load.
  virtual bool check(LoadContext& context, Reason& reason) = 0;

  // Validates shapes and dtypes of the operands and fills `schedule`. Called for the largest lengths on load, and
  // again whenever a length changes.
  virtual bool resolve(Reason& reason) = 0;

  // Rejects a call because of the contents of an input. Called for all ops before the first of them runs, so that a
  // rejected call changes nothing.
  virtual bool accept(Reason& /*reason*/) { return true; }

  // Called once per run on one thread, before the tasks. May fill `workspace` for them.
  virtual void start() {}

  // Computes one of `schedule.start_tasks`, after start(). Called concurrently.
  virtual void prepare(int64_t /*task*/) const {}

  // Computes tasks [begin, end). Called concurrently, with `schedule.scratch_bytes` of scratch for each worker.
  virtual void run(int64_t begin, int64_t end, char* scratch) const = 0;

  // Approximate number of elements that a run reads, at the resolved shapes.
  virtual double cost() const = 0;

  // Set by Program before check().
  const char* name = nullptr;
  const Op* op = nullptr;
  const KernelTable* kernels = nullptr;
  int64_t max_workers = 1;

  // Set by Program before resolve(), except for View::data, which is set before accept(). Every view lies inside its
  // buffer, and no output has two indices with the same address through a stride of zero.
  View inputs[kMaxOperands];
  bool has_input[kMaxOperands] = {};
  View outputs[kMaxOperands];

  // Set by resolve().
  Schedule schedule;

  // Set by Program before start(): `schedule.workspace_bytes`, which the next op reuses.
  char* workspace = nullptr;

 protected:
  // Whether the op has these numbers of operands, the first `required` inputs among them.
  bool has_operands(size_t input_count, size_t required, size_t output_count) const;

  // Whether `floats` is one finite number.
  bool has_one_float() const;

  bool wrong_operands(Reason& reason) const { return reason.set("%s has wrong operands", name); }
};

// One operator of the payload format.
struct OperatorEntry {
  format::OpCode code;
  const char* name;
  std::unique_ptr<Operator> (*make)();
};

// The entry for a code of a payload, or null if this runtime has none.
const OperatorEntry* find_operator(uint32_t code);

bool same_shape(const View& a, const View& b);

}  // namespace kernel_pytorch
