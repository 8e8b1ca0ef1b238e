#include "core/cache.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace kernel_pytorch {
namespace {

constexpr size_t kLine = 64;
constexpr int64_t kLastPosition = int64_t{1} << 40;
constexpr size_t kMaxBytes = size_t{1} << 40;

bool multiply(size_t& bytes, int64_t factor) {
  return !__builtin_mul_overflow(bytes, static_cast<size_t>(factor), &bytes) && bytes <= kMaxBytes;
}

}  // namespace

std::shared_ptr<Cache> Cache::make(const CacheShape& shape, Reason& reason) {
  std::shared_ptr<Cache> cache(new (std::nothrow) Cache());
  size_t rows = 1;
  const bool small =
      multiply(rows, shape.batch) && multiply(rows, shape.heads) && multiply(rows, shape.sinks + shape.ring);
  size_t keys = rows * size_of(shape.dtype), values = keys;
  if (!cache || !small || !multiply(keys, shape.dim) || !multiply(values, shape.value_dim)) {
    reason.set("cache '%.64s' is too large", shape.name.c_str());
    return nullptr;
  }
  cache->shape_ = shape;
  cache->low_ = shape.sinks;
  cache->rows_ = static_cast<int64_t>(rows);
  cache->keys_bytes_ = (keys + kLine - 1) / kLine * kLine;
  cache->values_bytes_ = (values + kLine - 1) / kLine * kLine;
  const size_t all = cache->keys_bytes_ + cache->values_bytes_ + 2 * rows * sizeof(float) + kLine;
  cache->memory_ = {static_cast<char*>(std::aligned_alloc(kLine, all / kLine * kLine)), std::free};
  if (!cache->memory_) {
    reason.set("no memory: cache '%.64s' needs %zu bytes", shape.name.c_str(), all);
    return nullptr;
  }
  return cache;
}

bool Cache::accepts(int64_t position, int64_t tokens, Reason& reason) const {
  const char* const name = shape_.name.c_str();
  if (position < 0 || position > seen_ || position > kLastPosition) {
    return reason.set("cache '%.64s': position %lld was given, and %lld tokens have been seen; pass 0 to %lld", name,
                      (long long)position, (long long)seen_, (long long)seen_);
  }
  if (tokens > shape_.ring - shape_.window) {
    return reason.set("cache '%.64s': %lld new tokens at once; it was made for at most %lld", name, (long long)tokens,
                      (long long)(shape_.ring - shape_.window));
  }
  const int64_t first = std::max(shape_.sinks, position - shape_.window);
  if (position > shape_.sinks && first < low_) {
    return reason.set(
        "cache '%.64s': position %lld needs tokens from %lld on, and those before %lld have been "
        "overwritten; start again at 0",
        name, (long long)position, (long long)first, (long long)low_);
  }
  return true;
}

void Cache::advance(int64_t position, int64_t tokens) {
  if (position <= shape_.sinks) low_ = shape_.sinks;
  position_ = position;
  seen_ = position + tokens;
  low_ = std::max(low_, seen_ - shape_.ring);
}

int64_t Cache::ranges(int64_t position, KeyRange* out) const {
  int64_t count = 0;
  const int64_t end = std::min(position + 1, seen_);
  if (shape_.sinks > 0 && end > 0) out[count++] = {0, std::min(shape_.sinks, end)};
  const int64_t begin = std::max(low_, position - shape_.window);
  if (begin >= end) return count;
  // At most `ring` positions: one range of slots, or two if they wrap around.
  const KeyRange used = {slot(begin), slot(end - 1) + 1};
  if (used.begin < used.end) {
    out[count++] = used;
  } else {
    out[count++] = {shape_.sinks, used.end};
    out[count++] = {used.begin, slots()};
  }
  return count;
}

}  // namespace kernel_pytorch
