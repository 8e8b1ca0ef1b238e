// A coverage-guided fuzzer of the payload reader and of everything that runs after it.
//
//   kernel_pytorch_fuzz CASES SEED payload...
//
// Takes payloads that are good, changes them, mends the checksum of most, loads them, and runs those that load on
// inputs of the declared shapes. A case that reaches new code joins the payloads that are changed. Anything but an
// error in words is a fault that the sanitizers stop at; the case is then written to ./crash.payload.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/crc32.h"
#include "core/program.h"

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

extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() { return "allocator_may_return_null=1:max_allocation_size_mb=512"; }

namespace {

using kernel_pytorch::Argument;
using kernel_pytorch::Program;
using kernel_pytorch::Reason;
using Bytes = std::vector<uint8_t>;

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  Bytes changed(const std::vector<Bytes>& known) {
    Bytes data = known[below(known.size())];
    for (size_t n = below(3) ? 1 : 1 + below(4); n > 0 && !data.empty(); --n) change(data, known);
    if (below(10) != 0) mend(data);
    return data;
  }

 private:
  void change(Bytes& data, const std::vector<Bytes>& known) {
    static const int64_t kInteresting[] = {0,          1,          2,         7,          8,           9,
                                           15,         16,         63,        64,         255,         -1,
                                           INT32_MAX,  INT32_MIN,  INT64_MAX, INT64_MIN,  int64_t{1} << 40,
                                           0x7fffffff, 0xffffffff, 65536,     1000000007, int64_t{1} << 62};
    const size_t at = below(data.size());
    switch (below(7)) {
      case 0:
        data[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:
        data[at] = static_cast<uint8_t>(random_());
        break;
      case 2:
      case 3: {
        // Numbers of four and eight bytes, where they usually stand.
        const size_t width = below(2) ? 4 : 8, place = at / 4 * 4;
        const int64_t value = kInteresting[below(std::size(kInteresting))];
        if (place + width <= data.size()) std::memcpy(data.data() + place, &value, width);
        break;
      }
      case 4: {
        const size_t place = at / 4 * 4;
        if (place + 4 <= data.size()) {
          uint32_t value;
          std::memcpy(&value, data.data() + place, 4);
          value += static_cast<uint32_t>(below(9)) - 4;
          std::memcpy(data.data() + place, &value, 4);
        }
        break;
      }
      case 5:
        if (below(4) == 0) data.resize(at);
        break;
      default: {
        const Bytes& other = known[below(known.size())];
        const size_t from = below(other.size()), count = std::min({below(64), other.size() - from, data.size() - at});
        std::memcpy(data.data() + at, other.data() + from, count);
      }
    }
  }

  static void mend(Bytes& data) {
    if (data.size() < 32) return;
    const uint64_t size = data.size();
    std::memcpy(data.data(), kernel_pytorch::format::kMagic, 8);
    std::memcpy(data.data() + 8, &kernel_pytorch::format::kVersion, 4);
    std::memcpy(data.data() + 16, &size, 8);
    const uint32_t sum = kernel_pytorch::crc32(data.data() + 16, data.size() - 16);
    std::memcpy(data.data() + 12, &sum, 4);
  }

  std::mt19937_64 random_;
};

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
    inputs[n].is_integer = program.input(n).kind == kernel_pytorch::format::kInteger;
    inputs[n].integer = 1;
    inputs[n].dtype = shape.dtype;
    inputs[n].rank = shape.rank;
    std::memcpy(inputs[n].dims, shape.dims, sizeof(shape.dims));
    const size_t own = static_cast<size_t>(shape.numel()) * size_of(shape.dtype);
    bytes += own;
    if (bytes > (1 << 22)) return false;
    memory.emplace_back(new char[own]());  // exactly as large as declared, so that one number too far is seen
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
    const Bytes data = n < static_cast<long>(known.size()) ? known[n] : mutator.changed(known);
    current = &data;
    fresh = false;
    counting = true;
    Reason reason;
    // Exactly as many bytes as there are, at the alignment that ExecuTorch gives.
    std::unique_ptr<uint8_t[]> exact(new uint8_t[data.size() + 1]);
    std::memcpy(exact.get(), data.data(), data.size());
    kernel_pytorch::Host host;
    host.workers = 2;
    auto program = Program::load(exact.get(), data.size(), host, reason);
    if (program) {
      ++loaded;
      const bool once = run(*program);
      ran += once && (!program->has_caches() || run(*program)) ? 1 : 0;  // what a cache keeps is read the second time
    } else if (reason.text[0] == 0) {
      std::fprintf(stderr, "kernel_pytorch_fuzz: a payload was refused without a reason\n");
      return 1;
    }
    counting = false;
    if (fresh && n >= static_cast<long>(known.size()) && known.size() < 4096) known.push_back(data);
  }
  std::printf("%ld cases, %ld loaded, %ld ran, %zu payloads reach all that was reached\n", cases, loaded, ran, known.size());
  return 0;
}
