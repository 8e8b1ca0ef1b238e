#include "core/cache.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
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

// The header of a saved history. Numbers are as in memory: a history stays on one kind of machine.
struct Cache::Saved {
  char magic[8];
  int64_t shape[8];
  int64_t seen, low;

  static constexpr char kMagic[9] = "KPTCACH1";

  static Saved of(const CacheShape& s, int64_t seen, int64_t low) {
    Saved saved = {{},
                   {static_cast<int64_t>(s.dtype), s.batch, s.heads, s.dim, s.value_dim, s.ring, s.sinks, s.window},
                   seen,
                   low};
    std::memcpy(saved.magic, kMagic, sizeof(saved.magic));
    return saved;
  }
};

template <typename Visit>
void Cache::visit_rows(int64_t used, Visit visit) const {
  const int64_t rows = shape_.batch * shape_.heads;
  const auto visit_all = [&](char* begin, size_t bytes_of_slot) {
    for (int64_t row = 0; row < rows; ++row) {
      visit(begin + static_cast<size_t>(row * slots()) * bytes_of_slot, static_cast<size_t>(used) * bytes_of_slot);
    }
  };
  visit_all(keys(), static_cast<size_t>(shape_.dim) * size_of(shape_.dtype));
  visit_all(values(), static_cast<size_t>(shape_.value_dim) * size_of(shape_.dtype));
  if (shape_.dtype == DType::kInt8) {
    visit_all(reinterpret_cast<char*>(key_scales()), sizeof(float));
    visit_all(reinterpret_cast<char*>(value_scales()), sizeof(float));
  }
}

size_t Cache::bytes_of(int64_t used) const {
  size_t bytes = sizeof(Saved);
  visit_rows(used, [&](char* /*row*/, size_t size) { bytes += size; });
  return bytes;
}

size_t Cache::saved_bytes() const { return bytes_of(used_slots(seen_, low_)); }

void Cache::save(char* out) const {
  const Saved saved = Saved::of(shape_, seen_, low_);
  std::memcpy(out, &saved, sizeof(saved));
  out += sizeof(saved);
  visit_rows(used_slots(seen_, low_), [&](const char* row, size_t size) {
    std::memcpy(out, row, size);
    out += size;
  });
}

size_t Cache::check_saved(const char* data, size_t size, Reason& reason) const {
  Saved saved;
  const char* const name = shape_.name.c_str();
  if (size < sizeof(saved)) {
    reason.set("cache '%.64s': the session ends before its history", name);
    return 0;
  }
  std::memcpy(&saved, data, sizeof(saved));
  const Saved own = Saved::of(shape_, saved.seen, saved.low);
  if (std::memcmp(&saved, &own, sizeof(saved)) != 0) {
    reason.set("cache '%.64s': the session is of a cache with another shape", name);
    return 0;
  }
  const bool good = saved.seen >= 0 && saved.seen <= kLastPosition && saved.low >= shape_.sinks &&
                    saved.low <= std::max(saved.seen, shape_.sinks) && saved.low >= saved.seen - shape_.ring;
  if (!good) {
    reason.set("cache '%.64s': the session has %lld tokens, and those before %lld overwritten, which cannot be", name,
               (long long)saved.seen, (long long)saved.low);
    return 0;
  }
  const size_t bytes = bytes_of(used_slots(saved.seen, saved.low));
  if (bytes > size) {
    reason.set("cache '%.64s': the session is cut", name);
    return 0;
  }
  return bytes;
}

void Cache::restore(const char* data) {
  Saved saved;
  std::memcpy(&saved, data, sizeof(saved));
  data += sizeof(saved);
  seen_ = saved.seen;
  low_ = saved.low;
  position_ = saved.seen;
  visit_rows(used_slots(seen_, low_), [&](char* row, size_t size) {
    std::memcpy(row, data, size);
    data += size;
  });
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
