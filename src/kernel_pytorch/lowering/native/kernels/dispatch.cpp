// Selects the kernel table at run time, by the instructions that the processor has.
#include <cstdlib>
#include <cstring>

#include "kernels/table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kernel_pytorch {

#if defined(__x86_64__)
const KernelTable* kernels_for_avx512vnni();
const KernelTable* kernels_for_avx512();
const KernelTable* kernels_for_avxvnni();
const KernelTable* kernels_for_avx2();
#elif defined(__aarch64__)
const KernelTable* kernels_for_i8mm();
const KernelTable* kernels_for_dotprod();
#endif
const KernelTable* kernels_for_baseline();

#if defined(__x86_64__)
// The products of bytes that processors without AVX-512 have, which not every compiler can be asked about.
static bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a >> 4 & 1) != 0;
}
#endif

int available_kernels(const KernelTable* tables[kMaxTables]) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  // Every processor with AVX2 has F16C too, which Clang before 15 cannot be asked about.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512vnni")) tables[count++] = kernels_for_avx512vnni();
  if (avx512) tables[count++] = kernels_for_avx512();
#if defined(KP_HAS_AVXVNNI)
  if (avx2 && has_avx_vnni()) tables[count++] = kernels_for_avxvnni();
#endif
  if (avx2) tables[count++] = kernels_for_avx2();
#elif defined(__aarch64__) && defined(__APPLE__)
  tables[count++] = kernels_for_dotprod();  // part of all of Apple's
#elif defined(__aarch64__) && defined(__linux__)
  const bool dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#if defined(KP_HAS_I8MM)
  if (dotprod && (getauxval(AT_HWCAP2) & HWCAP2_I8MM)) tables[count++] = kernels_for_i8mm();
#endif
  if (dotprod) tables[count++] = kernels_for_dotprod();
#endif
  tables[count++] = kernels_for_baseline();  // SSE2 on x86-64, NEON on 64-bit Arm
  return count;
}

const KernelTable* kernels(Reason& reason) {
  const char* const wanted = std::getenv("KERNEL_PYTORCH_TARGET");
  const KernelTable* tables[kMaxTables];
  const int count = available_kernels(tables);
  for (int n = 0; n < count; ++n) {
    if (wanted == nullptr || std::strcmp(tables[n]->name, wanted) == 0) return tables[n];
  }
  reason.set("KERNEL_PYTORCH_TARGET=%.32s: this processor has no such target; leave it unset", wanted);
  return nullptr;
}

}  // namespace kernel_pytorch
