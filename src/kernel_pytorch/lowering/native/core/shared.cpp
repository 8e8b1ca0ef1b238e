#include "core/shared.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace kernel_pytorch {
namespace {

template <typename Item>
struct Known {
  std::mutex lock;
  std::map<std::pair<const void*, std::string>, std::weak_ptr<Item>> items;
};

// The item that is there, or the one that `make` makes; both under the lock, so that two threads get the same.
template <typename Item, typename Make>
std::shared_ptr<Item> found(Known<Item>& known, const void* owner, const std::string& name, Make make) {
  if (owner == nullptr) return make();
  const std::lock_guard<std::mutex> held(known.lock);
  for (auto at = known.items.begin(); at != known.items.end();) at = at->second.expired() ? known.items.erase(at) : ++at;
  auto& entry = known.items[{owner, name}];
  auto item = entry.lock();
  if (!item) entry = item = make();
  return item;
}

bool same(const CacheShape& a, const CacheShape& b) {
  return a.dtype == b.dtype && a.batch == b.batch && a.heads == b.heads && a.dim == b.dim &&
         a.value_dim == b.value_dim && a.ring == b.ring && a.sinks == b.sinks && a.window == b.window;
}

}  // namespace

std::shared_ptr<Cache> shared_cache(const void* owner, const CacheShape& shape, Reason& reason) {
  static Known<Cache> known;
  auto cache = found(known, owner, shape.name, [&] { return Cache::make(shape, reason); });
  if (cache && !same(cache->shape(), shape)) {
    reason.set("cache '%.64s' has another shape in another method of the program", shape.name.c_str());
    return nullptr;
  }
  return cache;
}

std::shared_ptr<const char> shared_copy(const void* owner, const std::string& name, const uint8_t* data, uint64_t bytes,
                                        Reason& reason) {
  static Known<const char> known;
  auto copy = found(known, owner, name, [&] {
    char* const memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (memory != nullptr) std::memcpy(memory, data, bytes);
    return std::shared_ptr<const char>(memory, [](const char* p) { std::free(const_cast<char*>(p)); });
  });
  if (!copy) reason.set("no memory for %llu bytes of constants", (unsigned long long)bytes);
  return copy;
}

}  // namespace kernel_pytorch
