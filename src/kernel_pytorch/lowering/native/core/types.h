// Dtypes, strided views, and how an error is reported.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "core/format.h"

namespace kernel_pytorch {

using format::DType;
using format::kMaxRank;

static inline size_t size_of(DType dtype) {
  constexpr size_t kSizes[] = {4, 2, 2, 1, 8, 4, 1};
  static_assert(sizeof(kSizes) / sizeof(*kSizes) == static_cast<size_t>(DType::kCount), "one size for each dtype");
  return kSizes[static_cast<size_t>(dtype)];
}

static inline const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {"float32", "float16", "bfloat16", "bool", "int64", "int32", "int8"};
  static_assert(sizeof(kNames) / sizeof(*kNames) == static_cast<size_t>(DType::kCount), "one name for each dtype");
  return kNames[static_cast<size_t>(dtype)];
}

static inline bool is_float(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

// The next address that is a multiple of 64: of a cache line, and of the widest vector.
static inline char* align_up(char* p) {
  return p + (format::kAlignment - reinterpret_cast<uintptr_t>(p) % format::kAlignment) % format::kAlignment;
}

// Keys [begin, end) of one query.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// Strides count elements and are never negative. `data` includes the offset of the view.
struct View {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  int32_t rank = 0;
  int64_t dims[kMaxRank] = {};
  int64_t strides[kMaxRank] = {};

  int64_t numel() const {
    int64_t count = 1;
    for (int d = 0; d < rank; ++d) count *= dims[d];
    return count;
  }
};

// The text of an error. Functions that return bool return false after they have set it.
struct Reason {
  char text[320] = {};

  __attribute__((format(printf, 2, 3))) bool set(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    return false;
  }
};

}  // namespace kernel_pytorch
