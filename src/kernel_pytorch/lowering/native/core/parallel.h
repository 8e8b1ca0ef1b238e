// Parallel execution on the threads of the embedding runtime.
#pragma once

#include <cstdint>

namespace kernel_pytorch {

// Calls `work(context, worker)` once for each worker in [0, workers), concurrently if there are threads.
using Parallel = void (*)(int64_t workers, void (*work)(void* context, int64_t worker), void* context);

}  // namespace kernel_pytorch
