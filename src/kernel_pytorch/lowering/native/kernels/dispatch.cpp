#include <cstdlib>
#include <cstring>

#include "kernels/table.h"

namespace kernel_pytorch {

#if defined(__x86_64__)
const KernelTable* kernels_for_avx512();
const KernelTable* kernels_for_avx2();
#endif
const KernelTable* kernels_for_baseline();

namespace {

struct Candidate {
  const KernelTable* table;
  bool runs_here;
};

const KernelTable* choose(const char* wanted, Reason& reason) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const Candidate candidates[] = {
      {kernels_for_avx512(), avx512}, {kernels_for_avx2(), avx2}, {kernels_for_baseline(), true}};
#else
  const Candidate candidates[] = {{kernels_for_baseline(), true}};  // NEON is part of aarch64 itself
#endif
  for (const Candidate& candidate : candidates) {
    const bool named = wanted == nullptr || std::strcmp(candidate.table->name, wanted) == 0;
    if (candidate.runs_here && named) return candidate.table;
  }
  reason.set("KERNEL_PYTORCH_TARGET=%.32s: this processor has no such target; leave it unset", wanted);
  return nullptr;
}

}  // namespace

const KernelTable* kernels(Reason& reason) { return choose(std::getenv("KERNEL_PYTORCH_TARGET"), reason); }

}  // namespace kernel_pytorch
