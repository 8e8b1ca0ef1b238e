// Mutations of whole programs, through ExecuTorch: kernel_pytorch_fuzz_pte CASES SEED program.pte
//
// Mutates the segments that follow ExecuTorch's own tables: our payloads and the constants they share. Corrects the
// checksums of most, loads every method, and runs those that load. Our delegate is built with the sanitizers,
// ExecuTorch's library is the wheel's.
#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/platform/runtime.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <set>
#include <string>

#include "core/c_api.h"
#include "fuzz/mutator.h"

using executorch::extension::BufferDataLoader;
using executorch::extension::Module;
using executorch::runtime::Error;
using executorch::runtime::EValue;
using kernel_pytorch::fuzz::Bytes;

namespace {

const Bytes* current = nullptr;

void keep_current() {
  if (FILE* file = std::fopen("crash.pte", "wb")) {
    std::fwrite(current->data(), 1, current->size(), file);
    std::fclose(file);
  }
}

uint64_t number_at(const Bytes& data, size_t at) {
  uint64_t value = 0;
  if (at + 8 <= data.size()) std::memcpy(&value, data.data() + at, 8);
  return value;
}

// Runs every method on zeros; says how many ran, or -1 where one was refused without a reason.
int run(const Bytes& data) {
  Module module(std::make_unique<BufferDataLoader>(data.data(), data.size()));
  if (module.load(executorch::runtime::Program::Verification::InternalConsistency) != Error::Ok) return 0;
  const auto names = module.method_names();
  int ran = 0;
  for (const std::string& name : names.ok() ? names.get() : std::unordered_set<std::string>{}) {
    kernel_pytorch_last_error();
    if (module.load_method(name) != Error::Ok) {
      if (*kernel_pytorch_last_error() == 0) return -1;
      continue;
    }
    const auto meta = module.method_meta(name);
    std::vector<std::vector<char>> memory(meta->num_inputs());
    std::vector<executorch::extension::TensorPtr> tensors;
    std::vector<EValue> inputs;
    for (size_t n = 0; n < memory.size(); ++n) {
      const auto info = meta->input_tensor_meta(n);
      memory[n].resize(info->nbytes());
      std::vector<executorch::aten::SizesType> sizes(info->sizes().begin(), info->sizes().end());
      tensors.push_back(executorch::extension::make_tensor_ptr(sizes, memory[n].data(), info->scalar_type()));
      inputs.emplace_back(tensors.back());
    }
    ran += module.execute(name, inputs).ok() ? 1 : 0;
  }
  return ran;
}

}  // namespace

// The core is compiled to report coverage, which guides the payload fuzzer alone.
extern "C" __attribute__((visibility("default"))) void __sanitizer_cov_trace_pc() {}

extern "C" void __sanitizer_set_death_callback(void (*callback)());

extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1:max_allocation_size_mb=512:detect_odr_violation=0";
}

int main(int count, char** words) {
  if (count != 4) {
    std::fprintf(stderr, "usage: kernel_pytorch_fuzz_pte CASES SEED program.pte\n");
    return 2;
  }
  executorch::runtime::runtime_init();
  std::ifstream file(words[3], std::ios::binary);
  const Bytes whole{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  // The extended header: "eh00" at 8, its length, the size of the tables, and where the segments begin.
  if (whole.size() < 32 || std::memcmp(whole.data() + 8, "eh00", 4) != 0) {
    std::fprintf(stderr, "kernel_pytorch_fuzz_pte: %s is no program with segments\n", words[3]);
    return 2;
  }
  const size_t begin = number_at(whole, 24);
  const std::vector<Bytes> known = {Bytes(whole.begin() + static_cast<int64_t>(begin), whole.end())};
  std::vector<std::pair<size_t, uint64_t>> payloads;  // where each begins, after `begin`, and its bytes
  for (size_t at = 0; at + 32 <= known[0].size(); ++at) {
    if (std::memcmp(known[0].data() + at, kernel_pytorch::format::kMagic, 8) == 0) {
      payloads.emplace_back(at, number_at(known[0], at + 16));
    }
  }
  __sanitizer_set_death_callback(keep_current);
  kernel_pytorch::fuzz::Mutator mutator(std::strtoull(words[2], nullptr, 10));
  const long cases = std::strtol(words[1], nullptr, 10);
  long ran = 0;
  for (long n = 0; n < cases; ++n) {
    Bytes data = whole;
    if (n > 0) {
      Bytes changed = mutator.changed(known);
      changed.resize(known[0].size());
      if (mutator.below(10) != 0) {
        for (const auto& [at, size] : payloads) kernel_pytorch::fuzz::mend(changed.data() + at, size);
      }
      std::copy(changed.begin(), changed.end(), data.begin() + static_cast<int64_t>(begin));
    }
    current = &data;
    const int now = run(data);
    if (now < 0) {
      keep_current();
      std::fprintf(stderr, "kernel_pytorch_fuzz_pte: a program was refused without a reason\n");
      return 1;
    }
    if (n == 0 && now == 0) {
      std::fprintf(stderr, "kernel_pytorch_fuzz_pte: %s does not run\n", words[3]);
      return 2;
    }
    ran += now;
  }
  std::printf("%ld programs, %ld runs of their methods, the others refused\n", cases, ran);
  return 0;
}
