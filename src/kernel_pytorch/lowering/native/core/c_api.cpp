// The C interface, through which Python runs payloads without ExecuTorch: tests and eager mode.
#include "core/c_api.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "core/program.h"
#include "core/shared.h"

#if defined(KERNEL_PYTORCH_WITH_EXECUTORCH)
#include "core/threads.h"
#endif

using kernel_pytorch::Argument;
using kernel_pytorch::DType;
using kernel_pytorch::kMaxRank;
using kernel_pytorch::Program;
using kernel_pytorch::Reason;

static_assert(sizeof(KernelPyTorchTensor::dims) == sizeof(Argument::dims), "c_api.h has the same maximum rank");

namespace {

bool report(const Reason& reason, char* text, size_t size) {
  if (text != nullptr && size > 0) {
    std::strncpy(text, reason.text, size - 1);
    text[size - 1] = 0;
  }
  return false;
}

// Eager mode uses torch's OpenMP threads: two thread pools in one process would spin against each other.
using GompParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
std::atomic<GompParallel> gomp_parallel{nullptr};

struct Team {
  void (*work)(void*, int64_t);
  void* context;
  int64_t workers;
  std::atomic<int64_t> next{0};
};

void on_openmp(int64_t workers, void (*work)(void*, int64_t), void* context) {
  Team team{work, context, workers};
  const auto member = [](void* opaque) {
    // OpenMP may start fewer threads than requested: each takes workers until none is left.
    Team& own = *static_cast<Team*>(opaque);
    for (int64_t n = own.next++; n < own.workers; n = own.next++) own.work(own.context, n);
  };
  gomp_parallel.load()(member, &team, static_cast<unsigned>(workers), 0);
}

}  // namespace

void* kernel_pytorch_load(const void* bytes, size_t size, const void* owner, void* openmp, int64_t workers, char* text,
                          size_t text_size) {
  Reason reason;
  kernel_pytorch::Host host;
  host.owner = owner;
  if (openmp != nullptr) {
    gomp_parallel = reinterpret_cast<GompParallel>(openmp);
    host.workers = workers;
    host.parallel = on_openmp;
  }
#if defined(KERNEL_PYTORCH_WITH_EXECUTORCH)
  else {  // only now: the first call starts ExecuTorch's threads
    host.workers = kernel_pytorch::thread_count();
    host.parallel = kernel_pytorch::on_threads;
  }
#endif
  auto program = Program::load(static_cast<const uint8_t*>(bytes), size, host, reason);
  if (!program) report(reason, text, text_size);
  return program.release();
}

bool kernel_pytorch_run(void* handle, const KernelPyTorchTensor* inputs, size_t input_count,
                        KernelPyTorchTensor* outputs, size_t output_count, char* text, size_t text_size) {
  Program& program = *static_cast<Program*>(handle);
  Reason reason;
  if (input_count != program.input_count() || output_count != program.output_count() || input_count > 64 ||
      output_count > 64) {
    reason.set("%zu inputs and %zu outputs were given; the program has %zu and %zu", input_count, output_count,
               program.input_count(), program.output_count());
    return report(reason, text, text_size);
  }
  Argument arguments[64];
  for (size_t n = 0; n < input_count; ++n) {
    if (inputs[n].rank < 0 || inputs[n].rank > kMaxRank || !kernel_pytorch::format::is_one_of<DType>(inputs[n].dtype)) {
      reason.set("input %zu has %d dimensions and dtype %u", n, inputs[n].rank, inputs[n].dtype);
      return report(reason, text, text_size);
    }
    arguments[n].data = inputs[n].data;
    arguments[n].dtype = static_cast<DType>(inputs[n].dtype);
    arguments[n].rank = inputs[n].rank;
    std::memcpy(arguments[n].dims, inputs[n].dims, sizeof(arguments[n].dims));
  }
  if (!program.bind(arguments, reason)) return report(reason, text, text_size);
  void* data[64];
  for (size_t n = 0; n < output_count; ++n) {
    const auto& shape = program.output_shape(n);
    bool same = outputs[n].rank == shape.rank && outputs[n].dtype == static_cast<uint8_t>(shape.dtype);
    for (int d = 0; same && d < shape.rank; ++d) same = outputs[n].dims[d] == shape.dims[d];
    if (!same) {
      reason.set("output %zu has another shape or dtype than the program's", n);
      return report(reason, text, text_size);
    }
    data[n] = outputs[n].data;
  }
  return program.run(data, reason) || report(reason, text, text_size);
}

void kernel_pytorch_free(void* program) { delete static_cast<Program*>(program); }

size_t kernel_pytorch_session_bytes(const void* owner) {
  size_t bytes = 0;
  for (const auto& cache : kernel_pytorch::caches_of(owner)) bytes += cache->saved_bytes();
  return bytes;
}

void kernel_pytorch_save_session(const void* owner, char* out) {
  for (const auto& cache : kernel_pytorch::caches_of(owner)) {
    cache->save(out);
    out += cache->saved_bytes();
  }
}

bool kernel_pytorch_restore_session(const void* owner, const char* data, size_t size, char* text, size_t text_size) {
  const auto caches = kernel_pytorch::caches_of(owner);
  std::vector<const char*> histories;
  Reason reason;
  for (const auto& cache : caches) {
    const size_t bytes = cache->check_saved(data, size, reason);
    if (bytes == 0) return report(reason, text, text_size);
    histories.push_back(data);
    data += bytes;
    size -= bytes;
  }
  if (size != 0) {
    reason.set("the session has %zu bytes more than the caches of the program", size);
    return report(reason, text, text_size);
  }
  for (size_t n = 0; n < caches.size(); ++n) caches[n]->restore(histories[n]);
  return true;
}
