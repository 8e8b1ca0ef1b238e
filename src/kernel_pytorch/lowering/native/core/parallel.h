// Work over the threads that the embedding runtime offers.
#pragma once

#include <cstdint>

namespace kernel_pytorch {

// Calls `work(context, worker)` once for each worker below `workers`, at the same time where threads are there.
using Parallel = void (*)(int64_t workers, void (*work)(void* context, int64_t worker), void* context);

}  // namespace kernel_pytorch
