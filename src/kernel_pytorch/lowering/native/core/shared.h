// What the methods of one program share: found by the program and a name, and kept while one of them uses it.
#pragma once

#include <memory>
#include <string>

#include "core/cache.h"

namespace kernel_pytorch {

// Programs of one owner share; a null owner shares with nobody.
std::shared_ptr<Cache> shared_cache(const void* owner, const CacheShape& shape, Reason& reason);

// A copy of constants at an address that vectors like. The name must stand for the content.
std::shared_ptr<const char> shared_copy(const void* owner, const std::string& name, const uint8_t* data, uint64_t bytes,
                                        Reason& reason);

}  // namespace kernel_pytorch
