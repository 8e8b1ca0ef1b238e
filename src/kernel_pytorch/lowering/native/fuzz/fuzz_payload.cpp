// A coverage-guided fuzzer of the payload reader and the runtime.
//
//   kernel_pytorch_fuzz CASES SEED payload...
//
// Mutates valid payloads, corrects the checksum of most, loads them, and runs those that load on inputs of the declared
// shapes. A case that reaches new code becomes a seed. The sanitizers stop at the first fault, and the case is then
// written to ./crash.payload.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "core/program.h"
#include "fuzz/mutator.h"

namespace {

constexpr size_t kMap = 1 << 16;
uint8_t reached[kMap];
bool fresh = false;
bool counting = false;

}  // namespace

extern "C" __attribute__((visibility("default"), no_sanitize("address", "undefined"))) void __sanitizer_cov_trace_pc() {
  if (!counting) return;
  const auto place = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& seen = reached[(place ^ place >> 16) % kMap];
  fresh = fresh || seen == 0;
  seen = 1;
}

extern "C" void __sanitizer_set_death_callback(void (*callback)());

extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1:max_allocation_size_mb=512";
}

namespace {

using kernel_pytorch::Argument;
using kernel_pytorch::Program;
using kernel_pytorch::Reason;
using kernel_pytorch::size_of;
using kernel_pytorch::fuzz::Bytes;
using kernel_pytorch::fuzz::Mutator;

const Bytes* current = nullptr;

void keep_current() {
  if (FILE* file = std::fopen("crash.payload", "wb")) {
    std::fwrite(current->data(), 1, current->size(), file);
    std::fclose(file);
  }
}

bool run(Program& program) {
  std::vector<Argument> inputs(program.input_count());
  std::vector<std::unique_ptr<char[]>> memory;
  size_t bytes = 0;
  for (size_t n = 0; n < inputs.size(); ++n) {
    const auto& shape = program.input_shape(n);
    inputs[n].is_integer = program.input(n).kind == kernel_pytorch::format::ArgumentKind::kInteger;
    inputs[n].integer = 1;
    inputs[n].dtype = shape.dtype;
    inputs[n].rank = shape.rank;
    std::memcpy(inputs[n].dims, shape.dims, sizeof(shape.dims));
    const size_t own = static_cast<size_t>(shape.numel()) * size_of(shape.dtype);
    bytes += own;
    if (bytes > (1 << 22)) return false;
    memory.emplace_back(new char[own]());  // exactly as large as declared, so that an out-of-bounds access is detected
    inputs[n].data = memory.back().get();
  }
  Reason reason;
  if (program.cost() > 2e6 || !program.bind(inputs.data(), reason) || program.cost() > 2e6) return false;
  std::vector<void*> outputs;
  for (size_t n = 0; n < program.output_count(); ++n) {
    const auto& shape = program.output_shape(n);
    const size_t own = static_cast<size_t>(shape.numel()) * size_of(shape.dtype);
    bytes += own;
    if (bytes > (1 << 23)) return false;
    memory.emplace_back(new char[own]());
    outputs.push_back(memory.back().get());
  }
  return program.run(outputs.data(), reason);
}

}  // namespace

int main(int count, char** words) {
  if (count < 4) {
    std::fprintf(stderr, "usage: kernel_pytorch_fuzz CASES SEED payload...\n");
    return 2;
  }
  const long cases = std::strtol(words[1], nullptr, 10);
  Mutator mutator(std::strtoull(words[2], nullptr, 10));
  std::vector<Bytes> known;
  for (int n = 3; n < count; ++n) {
    std::ifstream file(words[n], std::ios::binary);
    known.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    if (known.back().empty()) {
      std::fprintf(stderr, "kernel_pytorch_fuzz: %s cannot be read\n", words[n]);
      return 2;
    }
  }
  __sanitizer_set_death_callback(keep_current);
  long loaded = 0, ran = 0;
  for (long n = 0; n < cases; ++n) {
    const bool original = n < static_cast<long>(known.size());
    Bytes data = original ? known[n] : mutator.changed(known);
    if (!original && mutator.below(10) != 0) kernel_pytorch::fuzz::mend(data.data(), data.size());
    current = &data;
    fresh = false;
    counting = true;
    Reason reason;
    std::unique_ptr<uint8_t[]> exact(new uint8_t[data.size() + 1]);
    std::memcpy(exact.get(), data.data(), data.size());
    kernel_pytorch::Host host;
    host.workers = 2;
    auto program = Program::load(exact.get(), data.size(), host, reason);
    if (program) {
      ++loaded;
      // The second run reads what the first wrote to the cache.
      const bool twice = run(*program) && (!program->has_caches() || run(*program));
      ran += twice ? 1 : 0;
    } else if (reason.text[0] == 0) {
      std::fprintf(stderr, "kernel_pytorch_fuzz: a payload was refused without a reason\n");
      return 1;
    }
    counting = false;
    if (fresh && !original && known.size() < 4096) known.push_back(data);
  }
  std::printf("%ld cases, %ld loaded, %ld ran, %zu payloads reach all that was reached\n", cases, loaded, ran,
              known.size());
  return 0;
}
