// Caches and constants that the methods of one program share, looked up by owner and name. Freed with the last user.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/cache.h"

namespace kernel_pytorch {

// Programs with the same owner share a cache of the same name. A null owner shares nothing.
std::shared_ptr<Cache> shared_cache(const void* owner, const CacheShape& shape, Reason& reason);

// The caches of an owner that are alive, by name.
std::vector<std::shared_ptr<Cache>> caches_of(const void* owner);

// A copy of a constant at an address aligned to 64 bytes. Constants with the same name must have the same contents.
std::shared_ptr<const char> shared_copy(const void* owner, const std::string& name, const uint8_t* data, uint64_t bytes,
                                        Reason& reason);

}  // namespace kernel_pytorch
