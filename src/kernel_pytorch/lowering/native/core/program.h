// A payload made ready to run: checked, its memory set aside. Running it allocates nothing.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "core/cache.h"
#include "core/mask.h"
#include "core/parallel.h"
#include "core/payload.h"
#include "kernels/table.h"

namespace kernel_pytorch {

// What a caller passes for one input: a contiguous tensor, or a number.
struct Argument {
  void* data = nullptr;
  bool is_integer = false;
  int64_t integer = 0;
  DType dtype = DType::kFloat32;
  int32_t rank = 0;
  int64_t dims[kMaxRank] = {};
};

// What a program is loaded into.
struct Host {
  int64_t workers = 1;
  Parallel parallel = nullptr;
  // Programs of one owner share caches and constants; without one a program shares nothing.
  const void* owner = nullptr;
  // The data of a shared constant, which must outlive the program; null where there is none of that size.
  const uint8_t* (*find)(void* context, const std::string& name, uint64_t bytes) = nullptr;
  void* context = nullptr;
};

constexpr int64_t kWorthAThread = 16384;  // numbers; below, waking a thread costs more than it saves

inline int64_t share(int64_t tasks, int64_t workers) { return tasks / (workers * 4) > 1 ? tasks / (workers * 4) : 1; }

class Program {
 public:
  // `bytes` must outlive the program, which reads its constants where they are.
  static std::unique_ptr<Program> load(const uint8_t* bytes, size_t size, const Host& host, Reason& reason);

  size_t input_count() const { return payload_.inputs.size(); }
  size_t output_count() const { return payload_.outputs.size(); }
  const Parameter& input(size_t n) const { return payload_.inputs[n]; }
  const Parameter& output(size_t n) const { return payload_.outputs[n]; }

  // Checks the inputs and works out every shape; an input that does not fit is refused by its name.
  bool bind(const Argument* inputs, Reason& reason);

  // After bind(): the shape of an output, as View::dims.
  const View& output_shape(size_t n) const { return output_shapes_[n]; }

  // Runs every op on the inputs that were bound last.
  bool run(void* const* outputs, Reason& reason);

  // At the lengths that were bound last, or the largest after load().
  const View& input_shape(size_t n) const { return input_shapes_[n]; }

  // About how many numbers a run touches at those lengths; the fuzzer leaves out what would take too long.
  double cost() const;

  bool has_caches() const { return !caches_.empty(); }

  uint64_t arena_bytes() const { return payload_.arena_bytes; }
  uint64_t scratch_bytes() const { return scratch_bytes_ * static_cast<uint64_t>(workers_); }

 private:
  struct ReadyOp {
    const Op* op;
    Mask mask;
    std::vector<float> immediates;
    View views[format::kRegisters * 2];  // inputs, then outputs
    bool there[format::kRegisters * 2] = {};
    PointwiseLoop loop;
    int64_t tasks = 0;
    int64_t tasks_at_once = 1;  // a worker takes this many
    int64_t rows_a_task = 1;    // of a linear
    int64_t workers = 1;
    size_t scratch = 0;
    Cache* cache = nullptr;
    int64_t position = 0;  // of the first token that is written to it
  };

  bool take_shared(const Host& host, Reason& reason);
  bool prepare(Reason& reason);                                      // once: what does not depend on shapes
  bool resolve(const std::vector<int64_t>& symbols, Reason& reason);  // for each new set of lengths
  bool evaluate(const std::vector<int64_t>& symbols, Reason& reason);
  bool resolve_value(uint32_t value, View& view, Reason& reason) const;
  bool resolve_op(ReadyOp& ready, Reason& reason);
  bool resolve_attention(ReadyOp& ready, Reason& reason);
  bool plan_attention(ReadyOp& ready, const View& q, int64_t kv_heads, int64_t keys, int64_t value_dim, int64_t slots,
                      int64_t work_runs, Reason& reason);
  bool resolve_row_op(ReadyOp& ready, Reason& reason);
  bool resolve_pointwise(ReadyOp& ready, Reason& reason);
  bool resolve_linear(ReadyOp& ready, Reason& reason);
  bool resolve_cache_write(ReadyOp& ready, Reason& reason);
  bool resolve_cached_attention(ReadyOp& ready, Reason& reason);
  int64_t buffer_elements(const Buffer& buffer) const;
  char* buffer_data(const Buffer& buffer) const;
  void point(ReadyOp& ready);
  static void work(void* context, int64_t worker);
  void linear_tasks(const ReadyOp& ready, int64_t begin, int64_t end, float* scratch) const;
  void attention_tasks(const ReadyOp& ready, int64_t begin, int64_t end, char* scratch) const;
  void cache_tasks(const ReadyOp& ready, int64_t begin, int64_t end, float* scratch) const;

  Payload payload_;
  std::vector<const char*> shared_;                    // the data of each shared constant
  std::vector<std::shared_ptr<const char>> copies_;    // of those that lay at an odd address
  std::vector<std::shared_ptr<Cache>> caches_;
  const KernelTable* kernels_ = nullptr;
  Parallel parallel_ = nullptr;
  int64_t workers_ = 1;
  std::vector<ReadyOp> ops_;
  std::vector<int64_t> symbols_, numbers_;  // what the symbols are bound to, and each expression's number
  bool resolved_ = false;
  std::vector<View> input_shapes_, output_shapes_;
  std::vector<void*> input_data_, output_data_;
  std::unique_ptr<char[]> memory_;
  char* arena_ = nullptr;
  char* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;  // of one worker
  const ReadyOp* running_ = nullptr;
  std::atomic<int64_t> next_{0};
};

}  // namespace kernel_pytorch
