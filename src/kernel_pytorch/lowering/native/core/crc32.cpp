#include "core/crc32.h"

#include <array>

namespace kernel_pytorch {
namespace {

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// Table n advances a byte past n further zero bytes, so that eight bytes are looked up at once.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (0xEDB88320u & (0u - (value & 1u)));
    tables[0][byte] = value;
  }
  for (size_t n = 1; n < 8; ++n) {
    for (size_t byte = 0; byte < 256; ++byte) {
      tables[n][byte] = (tables[n - 1][byte] >> 8) ^ tables[0][tables[n - 1][byte] & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32(const uint8_t* data, size_t size) {
  uint32_t value = 0xffffffffu;
  for (; size >= 8; data += 8, size -= 8) {
    const uint32_t low =
        value ^ (uint32_t{data[0]} | uint32_t{data[1]} << 8 | uint32_t{data[2]} << 16 | uint32_t{data[3]} << 24);
    value = kTables[7][low & 0xff] ^ kTables[6][low >> 8 & 0xff] ^ kTables[5][low >> 16 & 0xff] ^
            kTables[4][low >> 24] ^ kTables[3][data[4]] ^ kTables[2][data[5]] ^ kTables[1][data[6]] ^
            kTables[0][data[7]];
  }
  for (; size > 0; ++data, --size) value = (value >> 8) ^ kTables[0][(value ^ *data) & 0xff];
  return ~value;
}

}  // namespace kernel_pytorch
