// A C interface to the core: load a payload, run it on tensors in memory, free it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define KERNEL_PYTORCH_API extern "C" __attribute__((visibility("default")))

struct KernelPyTorchTensor {  // contiguous
  void* data;
  uint8_t dtype;
  int32_t rank;
  int64_t dims[8];
};

// Null, with the reason in `text`, where the payload is refused. `bytes` must outlive the program. Programs of one
// `owner`, any address, share their caches; with a null owner a program has its own. `openmp` is the GOMP_parallel of
// the OpenMP runtime whose threads the process uses already, to work on `workers` of them; null: ExecuTorch's threads.
KERNEL_PYTORCH_API void* kernel_pytorch_load(const void* bytes, size_t size, const void* owner, void* openmp,
                                             int64_t workers, char* text, size_t text_size);

// False, with the reason in `text`, where an input or output does not fit.
KERNEL_PYTORCH_API bool kernel_pytorch_run(void* program, const KernelPyTorchTensor* inputs, size_t input_count,
                                           KernelPyTorchTensor* outputs, size_t output_count, char* text,
                                           size_t text_size);

KERNEL_PYTORCH_API void kernel_pytorch_free(void* program);

// Why the last delegate call on this thread was refused, or empty; asking forgets it.
KERNEL_PYTORCH_API const char* kernel_pytorch_last_error();
