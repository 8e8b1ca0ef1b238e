// Parallel execution on ExecuTorch's thread pool, which XNNPACK uses too: two pools would compete for the cores.
#pragma once

#include <executorch/runtime/kernel/thread_parallel_interface.h>

#include <cstdint>

namespace kernel_pytorch {

inline int64_t thread_count() { return executorch::extension::get_thread_count(); }

inline void on_threads(int64_t workers, void (*work)(void*, int64_t), void* context) {
  executorch::extension::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) work(context, worker);
  });
}

}  // namespace kernel_pytorch
