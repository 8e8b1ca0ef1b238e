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

// Loads a payload, or returns null with the reason in `text`. `bytes` must outlive the program. Programs with the same
// `owner`, any address, share caches; a null owner shares nothing. `openmp` is GOMP_parallel of the OpenMP runtime
// whose threads the process already uses, of which the program uses `workers`; if it is null, ExecuTorch's threads are
// used.
KERNEL_PYTORCH_API void* kernel_pytorch_load(const void* bytes, size_t size, const void* owner, void* openmp,
                                             int64_t workers, char* text, size_t text_size);

// Runs a program, or returns false with the reason in `text` if an input or output does not fit.
KERNEL_PYTORCH_API bool kernel_pytorch_run(void* program, const KernelPyTorchTensor* inputs, size_t input_count,
                                           KernelPyTorchTensor* outputs, size_t output_count, char* text,
                                           size_t text_size);

KERNEL_PYTORCH_API void kernel_pytorch_free(void* program);

// Whether the file that this thread loads next has been verified as a whole. Its weights are then mapped and not read
// for their own checksums, so that loading takes no time for each byte. False until it is called.
KERNEL_PYTORCH_API void kernel_pytorch_file_verified(bool verified);

// The owner of the program with caches that ExecuTorch loaded last on this thread, or null. Clears it.
KERNEL_PYTORCH_API const void* kernel_pytorch_last_owner();

// The history in the caches of an owner, so that a later process can go on with it: its size, a copy into `out`, and
// taking it over. A history that does not fit is refused with the reason in `text`, and changes nothing. No program of
// the owner may run meanwhile.
KERNEL_PYTORCH_API size_t kernel_pytorch_session_bytes(const void* owner);
KERNEL_PYTORCH_API void kernel_pytorch_save_session(const void* owner, char* out);
KERNEL_PYTORCH_API bool kernel_pytorch_restore_session(const void* owner, const char* data, size_t size, char* text,
                                                       size_t text_size);

// The reason for which the last delegate call on this thread failed, or an empty text. Clears it.
KERNEL_PYTORCH_API const char* kernel_pytorch_last_error();
