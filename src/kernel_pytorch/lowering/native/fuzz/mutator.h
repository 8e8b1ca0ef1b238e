// Mutations for fuzzing: bit flips, boundary values, and pieces of other inputs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <random>
#include <vector>

#include "core/crc32.h"
#include "core/format.h"

namespace kernel_pytorch::fuzz {

using Bytes = std::vector<uint8_t>;

// Corrects the magic, version, size and checksum of a payload.
inline void mend(uint8_t* payload, uint64_t size) {
  if (size < format::kHeaderBytes) return;
  std::memcpy(payload, format::kMagic, 8);
  std::memcpy(payload + 8, &format::kVersion, 4);
  std::memcpy(payload + 16, &size, 8);
  const uint32_t sum = crc32(payload + 16, size - 16);
  std::memcpy(payload + 12, &sum, 4);
}

class Mutator {
 public:
  explicit Mutator(uint64_t seed) : random_(seed) {}

  size_t below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  Bytes changed(const std::vector<Bytes>& known) {
    Bytes data = known[below(known.size())];
    for (size_t n = below(3) ? 1 : 1 + below(4); n > 0 && !data.empty(); --n) change(data, known);
    return data;
  }

 private:
  void change(Bytes& data, const std::vector<Bytes>& known) {
    // clang-format off
    static const int64_t kBoundaries[] = {
        0, 1, 2, 7, 8, 9, 15, 16, 63, 64, 255, -1, 65536, 1000000007,
        0x7fffffff, 0xffffffff, INT32_MIN, INT64_MAX, INT64_MIN, int64_t{1} << 40, int64_t{1} << 62,
    };
    // clang-format on
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
        // Numbers of four and eight bytes at aligned offsets.
        const size_t width = below(2) ? 4 : 8, place = at / 4 * 4;
        const int64_t value = kBoundaries[below(std::size(kBoundaries))];
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

  std::mt19937_64 random_;
};

}  // namespace kernel_pytorch::fuzz
