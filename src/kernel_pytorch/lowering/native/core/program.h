// A payload that is ready to run: validated, with its memory allocated. Running it allocates nothing.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/cache.h"
#include "core/operator.h"
#include "core/parallel.h"
#include "core/payload.h"
#include "kernels/table.h"

namespace kernel_pytorch {

// One input of a call: a contiguous tensor, or an integer.
struct Argument {
  void* data = nullptr;
  bool is_integer = false;
  int64_t integer = 0;
  DType dtype = DType::kFloat32;
  int32_t rank = 0;
  int64_t dims[kMaxRank] = {};
};

// What the embedding runtime provides.
struct Host {
  int64_t workers = 1;
  Parallel parallel = nullptr;
  // Programs with the same owner share caches and constants. A null owner shares nothing.
  const void* owner = nullptr;
  // Returns a shared constant of this size, which must outlive the program, or null.
  const uint8_t* (*find)(void* context, const std::string& name, uint64_t bytes) = nullptr;
  void* context = nullptr;
  // The embedding runtime has verified the file that shared constants come from: their own checksums are not read.
  bool verified = false;
};

class Program {
 public:
  // `bytes` must outlive the program, which reads its constants in place.
  static std::unique_ptr<Program> load(const uint8_t* bytes, size_t size, const Host& host, Reason& reason);

  size_t input_count() const { return payload_.inputs.size(); }
  size_t output_count() const { return payload_.outputs.size(); }
  const Parameter& input(size_t n) const { return payload_.inputs[n]; }
  const Parameter& output(size_t n) const { return payload_.outputs[n]; }

  // Validates the inputs and resolves all shapes.
  bool bind(const Argument* inputs, Reason& reason);

  // The shape of an output after bind().
  const View& output_shape(size_t n) const { return output_shapes_[n]; }

  // Runs all ops on the inputs of the last bind().
  bool run(void* const* outputs, Reason& reason);

  // The shape of an input at the last bind(), or the largest one after load().
  const View& input_shape(size_t n) const { return input_shapes_[n]; }

  // Approximate number of elements that a run reads at those shapes. The fuzzer skips programs that would run long.
  double cost() const;

  bool has_caches() const { return !caches_.empty(); }

  uint64_t arena_bytes() const { return payload_.arena_bytes; }
  uint64_t scratch_bytes() const { return scratch_bytes_ * static_cast<uint64_t>(workers_) + workspace_bytes_; }

 private:
  // program.cpp
  bool load_shared(const Host& host, Reason& reason);
  bool make_operators(Reason& reason);
  bool allocate(Reason& reason);
  char* buffer_data(const Buffer& buffer) const;
  void set_data(Operator& op) const;
  void run_tasks(const Operator& op, int64_t tasks, int64_t tasks_per_claim, bool preparing);
  static void work(void* context, int64_t worker);

  // resolve.cpp: shapes for one set of symbols
  bool resolve(const std::vector<int64_t>& symbols, Reason& reason);
  bool evaluate(const std::vector<int64_t>& symbols, Reason& reason);
  bool resolve_parameter(const Parameter& parameter, View& shape, Reason& reason) const;
  bool resolve_value(uint32_t value, View& view, Reason& reason) const;
  bool resolve_operator(Operator& op, Reason& reason);
  int64_t buffer_elements(const Buffer& buffer) const;

  Payload payload_;
  std::vector<const char*> shared_;                  // data of each shared constant
  std::vector<std::shared_ptr<const char>> copies_;  // of shared constants at unaligned addresses
  std::vector<std::shared_ptr<Cache>> caches_;
  const KernelTable* kernels_ = nullptr;
  Parallel parallel_ = nullptr;
  int64_t workers_ = 1;
  std::vector<std::unique_ptr<Operator>> ops_;
  std::vector<int64_t> symbols_, sizes_;  // values of the symbols and of the expressions
  bool resolved_ = false;
  std::vector<View> input_shapes_, output_shapes_;
  std::vector<void*> input_data_, output_data_;
  std::unique_ptr<char[]> memory_;
  char* arena_ = nullptr;
  char* scratch_ = nullptr;
  char* workspace_ = nullptr;
  size_t scratch_bytes_ = 0;  // per worker
  size_t workspace_bytes_ = 0;
  const Operator* running_ = nullptr;  // this and the next three: what work() does
  int64_t tasks_ = 0, tasks_per_claim_ = 1;
  bool preparing_ = false;
  std::atomic<int64_t> next_task_{0};
};

}  // namespace kernel_pytorch
