// CRC-32 as zlib computes it (polynomial 0xEDB88320, reflected), eight bytes a step.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kernel_pytorch {

uint32_t crc32(const uint8_t* data, size_t size);

}  // namespace kernel_pytorch
