#include "core/shared.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace kernel_pytorch {
namespace {

template <typename Item>
struct Registry {
  std::mutex lock;
  std::map<std::pair<const void*, std::string>, std::weak_ptr<Item>> items;
};

// Returns the live item or the one that `make` returns. Both happen under the lock, so that two threads get the same.
template <typename Item, typename Make>
std::shared_ptr<Item> find_or_make(Registry<Item>& registry, const void* owner, const std::string& name, Make make) {
  if (owner == nullptr) return make();
  const std::lock_guard<std::mutex> guard(registry.lock);
  for (auto at = registry.items.begin(); at != registry.items.end();) {
    at = at->second.expired() ? registry.items.erase(at) : ++at;
  }
  auto& entry = registry.items[{owner, name}];
  auto item = entry.lock();
  if (!item) entry = item = make();
  return item;
}

Registry<Cache>& caches() {
  static Registry<Cache> registry;
  return registry;
}

bool same(const CacheShape& a, const CacheShape& b) {
  return a.dtype == b.dtype && a.batch == b.batch && a.heads == b.heads && a.dim == b.dim &&
         a.value_dim == b.value_dim && a.ring == b.ring && a.sinks == b.sinks && a.window == b.window;
}

}  // namespace

std::shared_ptr<Cache> shared_cache(const void* owner, const CacheShape& shape, Reason& reason) {
  auto cache = find_or_make(caches(), owner, shape.name, [&] { return Cache::make(shape, reason); });
  if (cache && !same(cache->shape(), shape)) {
    reason.set("cache '%.64s' has another shape in another method of the program", shape.name.c_str());
    return nullptr;
  }
  return cache;
}

std::vector<std::shared_ptr<Cache>> caches_of(const void* owner) {
  std::vector<std::shared_ptr<Cache>> found;
  const std::lock_guard<std::mutex> guard(caches().lock);
  for (const auto& [key, item] : caches().items) {
    auto cache = key.first == owner ? item.lock() : nullptr;
    if (cache) found.push_back(std::move(cache));
  }
  return found;
}

std::shared_ptr<const char> shared_copy(const void* owner, const std::string& name, const uint8_t* data, uint64_t bytes,
                                        Reason& reason) {
  static Registry<const char> registry;
  auto copy = find_or_make(registry, owner, name, [&] {
    char* const memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (memory != nullptr) std::memcpy(memory, data, bytes);
    return std::shared_ptr<const char>(memory, [](const char* p) { std::free(const_cast<char*>(p)); });
  });
  if (!copy) reason.set("no memory for %llu bytes of constants", (unsigned long long)bytes);
  return copy;
}

}  // namespace kernel_pytorch
